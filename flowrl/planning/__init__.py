"""Plans what a run will do and need, before anything is downloaded.

Configurations are checked as in `flowrl train`. Networks are built on the meta device, with shapes but no weights, so
that evaluations, FLOPs and activations are counted, not guessed. Nothing here uses the internet.

    plan.py         `flowrl.plan`, and what a card changes of a run
    counts.py       network evaluations of an iteration and of a run, as `NetworkCounter` counts them
    light_libraries.py  imports of a process that only plans
    network.py      a family's denoiser on the meta device: parameters, FLOPs and saved activations of one evaluation
    family_route.py  what a model's family says of it without weights: size, rows, tokens, parts, decoding
    stock_route.py   the same of a stock pipeline that no family is written for, by its own call
    published_models.py  sizes of the other parts and of downloads; licences
    memory.py       what a process holds, and the micro-batches that fit on cards
    gather.py       a configuration's `Plan`, from all of these
    sent_text.py    tokens of text as they are sent
    throughput.py   the pace that hours are reckoned by
    verdict.py      whether a run fits a card, and what makes it fit
    refusals.py     what `flowrl train` would refuse, and what would only come to light once weights are loaded
    text.py         a `Plan` for a terminal of 80 columns, by words.py
"""
