"""Trials of bad input that are listed: what people have got wrong, and what a hostile file would hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import yaml
from bad_input_draws import Trial, written
from bad_input_folder import CONFIG, TRAIN
from bad_input_models import adapter_trials, model_trials, resume_trials
from PIL import Image


def listed_trials() -> Iterator[Trial]:
    """All of them."""
    for made in (_yaml, _prompts, _rewards, model_trials, _sizes, adapter_trials, resume_trials, _folders, _commands):
        yield from made()


def _yaml() -> Iterator[Trial]:
    good = yaml.safe_dump(CONFIG)
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{new}: &{new} [{','.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    files: dict[str, str | bytes] = {
        "tab": good.replace("  dtype", "\tdtype"),
        "twice": good + "seed: 1\nseed: 2\n",
        "nan": good + "adv_eps: .nan\n",
        "python tag": good + "out: !!python/object/apply:os.system ['touch hacked']\n",
        "text": "just words\n",
        "number": "7\n",
        "empty": "",
        "comment": "# nothing\n",
        "utf-16": good.encode("utf-16"),
        "nul": good + "\0",
        "deep": good + "objective: {options: {a: " + "[" * 5000 + "]" * 5000 + "}}\n",
        "bomb": good + bomb.replace("a: &a", "objective: {options: {a: &a", 1).replace("]\n", "]}}\n", 1),
        "bomb in options": good + "credit:\n  options:\n" + "".join(f"    {line}\n" for line in bomb.splitlines()),
        "base absent": "base: absent\n",
        "base of itself": "base: bad.yaml\n",
        "base list": "base: [a, b]\n",
        "number key": good + "7: 8\n",
        "null section": good + "sampler:\n",
        "two documents": good + "---\nseed: 1\n",
        "foreign": "learning_rate: 1\ntrain_batch_size: 2\nnum_epochs: 3\nwandb: true\n",
        "only rewards": "rewards: []\n",
        "colon": "seed 0\n",
        "unclosed": "prompts: {train: prompts.txt\n",
        "huge number": good + "seed: " + "9" * 5000,
    }
    for name, text in files.items():
        for command in ("train", "plan") if name in ("bomb in options", "deep", "foreign") else ("train",):
            yield Trial(
                name=f"yaml {name} ({command})",
                words=[command, "bad.yaml"],
                says=("bad.yaml|absent",),
                prepare=written("bad.yaml", text),
            )
    for words in (
        ["train", "absent.yaml"],
        ["train", "tiny_g2rp"],
        ["plan", "model"],
        ["train", "images/0.png"],
        ["compare", "tiny.yaml", "absent.yaml", "--budget=images=8", "--out=c"],
        ["serve", "absent.yaml"],
    ):
        yield Trial(
            name=f"no configuration: {' '.join(words)}", words=words, says=(words[-1].split("=")[0][:5] + "|absent",)
        )
    for text in (
        "",
        "=",
        "=1",
        "seed",
        "seed==",
        "rewards.5.weight=1",
        "rewards.x.weight=1",
        "seed.a=1",
        "a..b=1",
        "rewards=[]",
        "rewards={}",
        "prompts=prompts.txt",
        "seed={",
        "seed=[",
        "pipeline=null",
    ):
        yield Trial(name=f"override '{text}'", words=[*TRAIN, text], says=())


def _prompts() -> Iterator[Trial]:
    texts: dict[str, str | bytes] = {
        "blank.txt": "\n  \n\t\n",
        "one.jsonl": '{"prompt": "a"',
        "list.jsonl": "[1]\n",
        "null.jsonl": '{"prompt": null}\n',
        "number.jsonl": '{"prompt": 7}\n',
        "absent.jsonl": '{"text": "a"}\n',
        "twice.jsonl": '{"prompt": "a", "prompt": "b"}\n',
        "nan.jsonl": '{"prompt": "a", "weight": NaN}\n',
        "deep.jsonl": '{"prompt": ' + "[" * 100_000 + "\n",
        "surrogate.jsonl": '{"prompt": "\\ud800"}\n',
        "latin.txt": "caf\u00e9".encode("latin-1"),
        "nothing.csv": "",
        "header.csv": "a,b\n1,2\n",
        "short.csv": "prompt,b\nx\n",
        "quotes.csv": 'prompt\n"a\n',
        "source.jsonl": '{"prompt": "a", "source": "absent.png"}\n',
        "folder.jsonl": '{"prompt": "a", "source": "images"}\n',
    }
    for name, text in texts.items():
        yield Trial(
            name=f"prompts {name}",
            words=[*TRAIN, f"prompts.train={name}"],
            says=(name.split(".")[0],),
            prepare=written(name, text),
            expect="either" if name in ("short.csv", "nan.jsonl") else "refused",
        )
    for given in (
        "absent.txt",
        "images",
        "images/0.png",
        "asset:../../pyproject.toml",
        "asset:prompts/absent.txt",
        "",
        "dataset:",
        "dataset:absent/folder",
        "dataset:images",
        "asset:",
        "~/absent.txt",
        "prompts.txt:0",
    ):
        yield Trial(name=f"prompts at {given!r}", words=[*TRAIN, f"prompts.train={given}"])
    yield Trial(
        name="prompts through a pipe",
        words=[*TRAIN, "prompts.train=pipe.txt"],
        says=("pipe.txt",),
        prepare=lambda folder: os.mkfifo(folder / "pipe.txt"),
    )
    yield Trial(
        name="prompts of a device",
        words=[*TRAIN, "prompts.train=zero.txt"],
        says=("zero.txt",),
        prepare=lambda folder: (folder / "zero.txt").symlink_to("/dev/zero"),
    )
    yield Trial(
        name="a prompt of a megabyte",
        words=[*TRAIN, "prompts.train=long.txt", "out=new", "num_iterations=1"],
        says=("long.txt",),
        prepare=written("long.txt", "red " * 250_000),
    )
    yield Trial(
        name="evaluation on training prompts",
        expect="works",
        says=("trained on",),
        changes=("new",),
        words=[*TRAIN, "prompts.eval=prompts.txt", "out=new", "num_iterations=1"],
    )
    bomb = Image.new("1", (20_000, 20_000))

    def with_bomb(folder: Path) -> None:
        bomb.save(folder / "images" / "bomb.png")
        (folder / "bomb.jsonl").write_text('{"prompt": "a", "source": "images/bomb.png"}\n')

    yield Trial(name="source image bomb", words=[*TRAIN, "prompts.train=bomb.jsonl"], prepare=with_bomb)
    yield Trial(
        name="scored image bomb",
        words=["reward", "score", "jpeg_compressibility", "images", "--prompt=a"],
        says=("bomb.png",),
        expect="works",  # the other images have their scores
        prepare=with_bomb,
        changes=("scores.csv",),
    )


def _user_reward(name: str, source: str | bytes, *more: str, says: str = "") -> Trial:
    """A run with the function `bad` of a file, `more` on its command line; with `says` it is refused."""
    return Trial(
        name=name,
        words=[*TRAIN, "rewards=[{file: bad.py, function: bad}]", "out=new", *more],
        expect="refused" if says else "works",
        says=(says,) if says else (),
        prepare=written("bad.py", source),
        changes=("new",),
    )


def _rewards() -> Iterator[Trial]:
    head = "def bad(images, prompts, metadata):\n    "
    bodies = {
        "raises": "raise RuntimeError('no luck')",
        "exits": "import sys; sys.exit(0)",
        "exits in words": "raise SystemExit('bye')",
        "stops": "raise GeneratorExit",
        "too few": "return [1.0]",
        "text": "return 'good'",
        "none": "pass",
        "complex": "return images.mean((1, 2, 3)) * 1j",
        "objects": "return [object()] * len(prompts)",
        "all nan": "return [float('nan')] * len(prompts)",
        "table": "return images.mean((2, 3))",
        "recursion": "return bad(images, prompts, metadata)",
        "memory": "import torch; torch.empty(1 << 50)",
        "key": "return metadata[0]['absent']",
        "assertion": "assert False",
        "index": "return prompts[10 ** 9]",
        "constant": "return [0.5] * len(prompts)",
        "infinite": "return [float('inf')] * len(prompts)",
        "decodes": "return b'\\xff'.decode()",
        "os error": "open('/absent/file')",
        "dictionary": "return dict(enumerate(prompts))",
    }
    for name, body in bodies.items():
        yield _user_reward(f"reward that is {name}", head + body + "\n", "num_iterations=4", says="bad|reward")
    harmless = {
        "writes into images": "value = 100 * images.mean((1, 2, 3)); images.zero_(); return value",
        "changes metadata": "[m.update(x=1) for m in metadata]; prompts.clear(); return 100 * images.mean((1, 2, 3))",
        "changes directory": "import os; os.chdir('/'); return 100 * images.mean((1, 2, 3))",
        "changes default dtype": "import torch; torch.set_default_dtype(torch.float64); return images.mean((1, 2, 3))",
        "turns gradients off": "import torch; torch.set_grad_enabled(False); return 100 * images.mean((1, 2, 3))",
        "seeds": "import torch, random; torch.manual_seed(0); random.seed(0); return 100 * images.mean((1, 2, 3))",
        "prints": "print('x' * 1000); return 100 * images.mean((1, 2, 3))",
    }
    for name, body in harmless.items():
        yield _user_reward(f"reward that {name}", head + body + "\n")
    files: dict[str, str | bytes] = {
        "exits": "import sys; sys.exit(0)\n",
        "syntax": "def bad(:\n",
        "absent module": "import absent_module\n",
        "empty": "",
        "no function": "bad = 7\n",
        "two arguments": "def bad(a, b):\n    return a\n",
        "class": "class bad:\n    pass\n",
        "binary": "\0\1\2",
        "chdir": "import os; os.chdir('/')\n" + head + "return [0.0] * len(prompts)\n",
        "recursion": "def f():\n    f()\nf()\n",
        "keyboard": "raise BaseException('odd')\n",
    }
    for name, text in files.items():
        yield _user_reward(f"reward file: {name}", text, "num_iterations=4", says="bad")
    for entry, said in (
        ("{name: genval}", "genval"),
        ("{name: geneval}", "geneval"),
        ("{file: brightness.py}", "function"),
        ("{function: f}", "file"),
        ("{}", "name"),
        ("7", "reward"),
        ("{name: jpeg_compressibility, file: a.py, function: f}", "name"),
        ("{file: brightness.py, function: brightness, options: {radius: 3}}", "radius"),
        ("{name: jpeg_compressibility, options: {qualty: 3}}", "qualty"),
        ("{name: jpeg_compressibility, weight: .inf}", "weight"),
        ("{name: jpeg_compressibility, weight: heavy}", "weight"),
        ("{name: jpeg_compressibility, clip: [2, 1]}", "clip"),
        ("{name: jpeg_compressibility, schedule: [[5, 1], [2, 1]]}", "schedule"),
        ("{name: remote, options: {url: 'ftp://x'}}", "url"),
        ("{name: remote, options: {url: 'http://127.0.0.1:9/score', deadline: 1}}", "127.0.0.1"),
        ("{name: aesthetic, options: {model: absent}}", "absent|aesthetic"),
        ("{name: jpeg_compressibility, frames: {policy: all}}", "video|frames"),
        ("{file: images, function: f}", "images"),
        ("{file: '', function: f}", "file"),
        ("{name: null}", "name"),
        ("{name: jpeg_compressibility, gate: high}", "gate"),
        ("{name: jpeg_compressibility, weight: 0}", "weight|reward"),
    ):
        yield Trial(
            name=f"reward entry {entry}",
            words=[*TRAIN, f"rewards=[{entry}]", "out=new"],
            says=(said,),
            changes=("new",),
        )


def _sizes() -> Iterator[Trial]:
    for pair in (
        "threads=100000",
        "threads=1000000000000",
        "sampler.num_steps=100000000",
        "group_size=1000000000",
        "prompts_per_step=1000000000",
        "num_iterations=10000000000000000000",
        "policy.lora_rank=100000",
        "pipeline.height=1000000",
        "pipeline.max_sequence_length=1000000000",
        "eval.num_steps=1000000000",
        "eval.samples_per_prompt=1000000000",
        "sampler.noise_level=1e308",
        "sampler.guidance_scale=1e300",
        "optim.lr=1e308",
        "sampler.shift=1e308",
        "updates_per_rollout=1000000000",
        "adv_eps=1e308",
        "clip_range=1e308",
        "kl_coef=1e308",
        "policy.lora_alpha=1000000000000",
        "sampler.sde_window_size=1000",
        "sampler.sde_window_range=[5, 2]",
        "sampler.sde_window_range=[0, 99]",
        "optim.betas=[1, 1]",
        "micro_batch_size=0",
        "rollout_batch_size=-5",
        "group_size=1",
        "adv_clip_range=0",
        "sampler.trained_fraction=0",
        "sampler.kernel=ode",
        "sampler.noise_level=0",
        "best_of=99",
        "policy.ema_decay=1",
    ):
        for command in ("train", "plan") if "0000000" in pair else ("train",):
            yield Trial(
                name=f"size {command} {pair}",
                words=[command, "tiny.yaml", pair],
                says=(pair.split("=")[0].split(".")[-1],),
            )


def _folders() -> Iterator[Trial]:
    one = "num_iterations=1"
    for out in (
        "images",
        "run",
        "prompts.txt",
        "prompts.txt/x",
        "model",
        "",
        "a\0b",
        "x" * 300,
        "/dev/null",
        "/proc/x",
    ):
        if "\0" not in out:
            yield Trial(name=f"train into {out[:20]!r}", words=[*TRAIN, f"out={out}", one])
    failing = written("bad.py", "def bad(images, prompts, metadata):\n    raise RuntimeError('no luck')\n")

    def linked(folder: Path) -> None:
        failing(folder)
        (folder / "empty").mkdir()
        (folder / "link").symlink_to("empty")

    yield Trial(
        name="a failing reward in a linked folder",
        prepare=linked,
        says=("no luck",),
        changes=("link", "empty"),
        words=[*TRAIN, "out=link", "rewards=[{file: bad.py, function: bad}]"],
    )
    yield Trial(
        name="train into a linked folder",
        words=[*TRAIN, "out=link", one],
        expect="works",
        prepare=linked,
        changes=("empty", "link"),
    )
    for words in (
        ["report", "run", "--out=mine.txt"],
        ["report", "run", "--out=/dev/full"],
        ["report", "run", "--out=images"],
        ["report", "run", "--out=absent/deep/x.html"],
        ["reward", "score", "jpeg_compressibility", "images", "--prompt=a", "--out=mine.txt"],
        ["reward", "score", "jpeg_compressibility", "images", "--prompt=a", "--out=prompts.txt"],
        ["reward", "score", "jpeg_compressibility", "images", "--prompt=a", "--out=tiny.yaml"],
        ["reward", "score", "jpeg_compressibility", "images", "--prompt=a", "--out=images"],
        ["sample", "run", "--prompt=a", "--steps=1", "--out=mine.txt"],
        ["sample", "run", "--prompt=a", "--steps=1", "--out=images"],
        ["compare", "tiny.yaml", "--out=images", "--budget=images=8"],
        ["compare", "tiny.yaml", "--out=mine.txt", "--budget=images=8"],
        ["eval", "run", "--out=mine.txt"],
        ["sweep", "run", "--out=mine.txt"],
        ["sweep", "run", "--out=images"],
        ["reward", "card", "jpeg_compressibility", "images", "--prompt=a", "--out=mine.txt"],
        ["reward", "card", "jpeg_compressibility", "images", "--prompt=a", "--out=images"],
        ["reward", "rubric", "pairs.jsonl", "--judge={server: 'http://127.0.0.1:9', model: m}", "--out=mine.txt"],
    ):
        # New files may be put beside others.
        beside = words[-1] == "--out=images" and (words[0] == "sample" or words[:2] == ["reward", "card"])
        either = beside or words[-1] == "--out=absent/deep/x.html"
        yield Trial(name=" ".join(words), words=words, expect="either" if either else "refused", changes=("absent",))


def _commands() -> Iterator[Trial]:
    listed = Path(__file__).with_name("bad_commands.txt").read_text().splitlines()
    for line in (text for text in listed if text and not text.startswith("#")):
        words = line.removeprefix("? ").split()
        expect: Literal["either", "refused"] = "either" if line.startswith("? ") else "refused"
        yield Trial(name=" ".join(words), words=words, expect=expect, changes=("evaluations",))
    for line in ("--help", "train --help", "reward --help", "--version", "report run", "plan tiny.yaml"):
        yield Trial(name=f"{line} (good)", words=line.split(), expect="works", changes=("run/report.html", "run/.lock"))
