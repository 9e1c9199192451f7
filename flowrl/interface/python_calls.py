"""`flowrl.sample`, `evaluate`, `plan` and `compare`: the commands, called from Python.

Each calls what its command calls, with arguments that the command's own parser has read. What a command refuses, or
ends with, is raised as `flowrl.FlowrlError`, one paragraph; Ctrl-C stays a KeyboardInterrupt. Torch loads with the
first call that needs it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.interface.argument_words import override_words, parsed_words, texts
from flowrl.runtime.failures import FlowrlError, describe_error
from flowrl.runtime.process_settings import before_libraries_load

if TYPE_CHECKING:
    from flowrl.interface.call_results import Evaluation, MethodComparison, Samples
    from flowrl.runs.trained_run import TrainedRun

Config = str | Path | Mapping[str, Any]
"""A YAML file, the name of a configuration that ships with flowrl, or settings as a mapping (it may have a `base`)."""
Words = str | Path | Sequence[str | Path]
"""One or several."""

__all__ = ["compare", "evaluate", "sample"]


def sample(
    model: str | Path | TrainedRun = "asset:tiny-sd3", prompts: Words = (), *, prompt_file: str | Path | None = None,
    seeds: int | Sequence[int] = 0, out: str | Path | None = None, source: Words = (), lora: Words = (),
    before_training: bool = False, steps: int | None = None, guidance: float | None = None, height: int | None = None,
    width: int | None = None, dtype: str | None = None, max_sequence_length: int | None = None,
    batch_size: int | None = None, device: str | None = None, rlg: str | float | None = None, show: bool = True,
) -> Samples:  # fmt: skip
    """Draws images or videos, as `flowrl sample` does.

    Args:
        model: run folder or what `train` returned, LoRA or model folder, hub id or `asset:NAME`.
        prompts: one text or several.
        prompt_file: .txt, .jsonl or .csv, or `asset:NAME`; beside or instead of `prompts`.
        seeds: of the start noise; every prompt is drawn with every seed. A seed's noise is the same for all models.
        out: folder for the files; None writes none.
        source: images that `prompts` edit or animate.
        lora: folders of LoRAs to add to the model; several with `rlg`.
        before_training: draw with the run's model before training.
        steps: denoising steps.
        guidance: scale.
        height: pixels.
        width: pixels.
        dtype: "float32", "bfloat16" or "float16".
        max_sequence_length: text tokens that are read.
        batch_size: images at once.
        device: "cpu", "cuda" or "cuda:N".
        rlg: guidance from the base to the tuned model, a scale per LoRA, as "1.5" or "1.5,0.5".
        show: print what the command prints, and show progress.

    Raises:
        FlowrlError: no prompt, an unknown model, options that contradict each other.

    >>> drawn = flowrl.sample("asset:tiny-sd3", "a photo of a red circle", seeds=[0, 1], steps=2, show=False)
    >>> [image.size for image in drawn.images], drawn.seeds, drawn.grid.size > (64, 64)
    ([(64, 64), (64, 64)], (0, 1), True)
    """
    with _as_own_error(), _shown(show):
        parsed = parsed_words("sample", [_place(model)], {
            "prompt": texts(prompts), "prompts": prompt_file, "source": texts(source), "lora": texts(lora),
            "before_training": before_training, "steps": steps, "guidance": guidance, "height": height, "width": width,
            "dtype": dtype, "max_sequence_length": max_sequence_length, "batch_size": batch_size, "device": device,
            "rlg": rlg, "seeds": ",".join(map(str, [seeds] if isinstance(seeds, int) else seeds)),
        })  # fmt: skip
        parsed.out = None if out is None else Path(out)
        from flowrl.commands.sample.run import drawn
        from flowrl.interface.run_reading import samples_of

        return samples_of(drawn(parsed), parsed.out)


def evaluate(
    models: str | Path | TrainedRun | Sequence[str | Path] = "asset:tiny-sd3", benchmark: str = "geneval", *,
    baseline: str | Path | None = None, images: str | Path | None = None, out: str | Path | None = None,
    lora: str | Path | None = None, prompts: str | Path | None = None, num_prompts: int | None = None,
    samples: int | None = None, judge: str | None = None, options: Mapping[str, object] | None = None, seed: int = 0,
    steps: int | None = None, guidance: float | None = None, height: int | None = None, width: int | None = None,
    dtype: str | None = None, max_sequence_length: int | None = None, batch_size: int | None = None,
    device: str | None = None, show: bool = True,
) -> Evaluation:  # fmt: skip
    """Measures models on a benchmark, as `flowrl eval` does; the same call continues where it stopped.

    Args:
        models: run folder or what `train` returned, LoRA or model folder, hub id or `asset:NAME`; several count as
            trainings of one method.
        benchmark: its name (docs/benchmarks.md).
        baseline: what the model is compared to; "base" is the run's model before training.
        images: a folder of images to judge instead of `models`.
        out: folder to write; None is `evaluations/BENCHMARK-MODEL`.
        lora: folder of a LoRA to add.
        prompts: file of prompts, or "published" or "world".
        num_prompts: spread evenly over the file.
        samples: images per prompt.
        judge: that the benchmark knows by name, or a mapping as text.
        options: of the benchmark, its judge or a reward.
        seed: of all random draws.
        steps: denoising steps.
        guidance: scale.
        height: pixels.
        width: pixels.
        dtype: "float32", "bfloat16" or "float16".
        max_sequence_length: text tokens that are read.
        batch_size: images drawn or scored at once.
        device: "cpu", "cuda" or "cuda:N".
        show: print what the command prints, and show progress.

    Raises:
        FlowrlError: before weights load for what can be known then.

    >>> flowrl.evaluate(benchmark="genevil", show=False)
    Traceback (most recent call last):
    flowrl.runtime.failures.FlowrlError: --benchmark genevil: unknown benchmark 'genevil' ... allowed: diversity, ...
    """
    with _as_own_error(), _shown(show):
        several = models if isinstance(models, list | tuple) else [models]
        given = [] if images is not None else [_place(model) for model in several]
        parsed = parsed_words("eval", given, {
            "benchmark": benchmark, "baseline": baseline, "images": images, "out": out, "lora": lora,
            "prompts": prompts, "num_prompts": num_prompts, "samples": samples, "judge": judge, "seed": seed,
            "option": [f"{key}={value}" for key, value in (options or {}).items()], "steps": steps,
            "guidance": guidance, "height": height, "width": width, "dtype": dtype,
            "max_sequence_length": max_sequence_length, "batch_size": batch_size, "device": device,
        })  # fmt: skip
        from flowrl.commands.eval.run import evaluated
        from flowrl.interface.run_reading import evaluation_of

        return evaluation_of(evaluated(parsed), benchmark)


def compare(
    configs: Words, *, out: str | Path, budget: str | None = None, num_seeds: int | None = None,
    evals: int | None = None, jobs: int = 1, baseline: str | None = None, metric: str | None = None,
    report_only: bool = False, show: bool = True, **settings: Any,
) -> MethodComparison:  # fmt: skip
    """Trains several methods to one budget and compares them, as `flowrl compare` does.

    Each run is a process of its own, so that configurations are files or names of shipped ones, not mappings. The same
    call continues where it stopped; methods and seeds may be added.

    Args:
        configs: YAML files, or names of those that ship.
        out: folder of the comparison.
        budget: of each run, such as "nfe=200000", "seconds=600" or "images=5000".
        num_seeds: training seeds of each method; None is 5.
        evals: evaluations spread over the budget; None is 2.
        jobs: trainings side by side.
        baseline: one of the methods; None is the first.
        metric: of the evaluations; None is the GenEval score, else the first reward.
        report_only: read and write the report again, train nothing.
        show: print what the command prints, and show progress.
        **settings: replace those of every configuration, as in `train`.

    Raises:
        FlowrlError: something is wrong, the folder holds another comparison, or no run has finished.
    """
    with _as_own_error(), _shown(show):
        several = [configs] if isinstance(configs, str | Path | Mapping) else configs
        if any(isinstance(one, Mapping) for one in several):
            raise FlowrlError("compare trains in processes of their own: give files or names of configurations")
        parsed = parsed_words("compare", [*texts(configs), *override_words(settings)], {
            "out": out, "budget": budget, "num_seeds": num_seeds, "evals": evals, "jobs": jobs, "baseline": baseline,
            "metric": metric, "report_only": report_only,
        })  # fmt: skip
        from flowrl.commands.compare.run import compared
        from flowrl.interface.run_reading import comparison_of

        made = compared(parsed)
        if made.code == 130:
            raise KeyboardInterrupt(f"Stopped. The same call continues the comparison in {out}.")
        return comparison_of(made, Path(out))


def _place(model: object) -> str:
    """A model as the command line names it; a run by its folder."""
    folder = getattr(model, "folder", None)
    return str(model if folder is None else folder)


@contextmanager
def _as_own_error() -> Iterator[None]:
    """Tells every error in one paragraph; that of bad input without the frames that found it."""
    before_libraries_load()
    try:
        yield
    except FlowrlError:
        raise
    except (ValueError, OSError) as error:
        raise FlowrlError(describe_error(error)) from error.__cause__
    except (Exception, SystemExit) as error:
        raise FlowrlError(describe_error(error)) from error


@contextmanager
def _shown(show: bool) -> Iterator[None]:
    with ExitStack() as stack:
        if not show:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield
