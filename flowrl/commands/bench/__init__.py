"""`flowrl bench [CONFIG]`: the phases of an iteration timed on this machine, beside what the machine could reach.

arguments.py    what the command takes
run.py          sections one after another, the folder of a bench, and two benches beside each other
bench_subject.py  what is measured: pipeline, LoRA, rewards and prompts of a configuration, on random weights if need be
stopwatch.py    repeats, medians and spread; memory, operations and saved bytes of a call
ceilings.py     matrix products, copies and attention alone: the denominators
network_phases.py  forward, backward, guidance, checkpointing
part_phases.py  text, decoding, each reward, noise, gradient sums, the optimizer, checkpoints
compiled_phases.py  the network with compiled blocks, and the seconds of compiling
iterations.py   whole iterations by the recipe itself, and the first importance ratio
result.py       a bench as data: what `bench.json` holds
bench_text.py   a bench, or two beside each other, on a terminal of 80 columns
page.py         the same as a page
bench_figures.py  charts of the page: two bars a row
"""
