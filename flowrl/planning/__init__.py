"""Plans what a run will do and need, before anything is downloaded.

Configurations are checked as in `flowrl train`. Networks are built on the meta device, with shapes but no weights, so
that evaluations, FLOPs and activations are counted, not guessed. Nothing here uses the internet. `plan.py` answers the
call, and `gather.py` makes a configuration's `Plan` of what the other files count.
"""
