"""`flowrl push`: the card by the hub's own reader, what is listed, what stays out, uploads to a hub on loopback."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from diffusers import StableDiffusion3Pipeline
from huggingface_hub import ModelCard, constants
from huggingface_hub.repocard_data import model_index_to_eval_results
from safetensors import safe_open
from tiny_models import save_tiny_sd3
from tiny_runs import TinyRuns, tiny_runs

from flowrl.cli import main
from flowrl.generation.models import find_source
from flowrl.pipelines.places.known_checkpoints import checkpoints
from flowrl.publishing.model_card import TERMS, settings_without_places, terms_of, without_places

HELD = ["a grey cat", "a tall house", "a red bus", "two old chairs | pipes <b>"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> TinyRuns:
    folder = tmp_path_factory.mktemp("push")
    (folder / "held.txt").write_text("\n".join(HELD) + "\n")
    rewards = [{"file": str(folder / "brightness.py"), "function": "brightness"}]
    return tiny_runs(
        folder, save_tiny_sd3(folder / "model"), eval_every=2, checkpoint_every=2,
        prompts={"train": str(folder / "prompts.txt"), "eval": str(folder / "held.txt")},
        eval={"num_images": 4, "rewards": rewards},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(runs: TinyRuns) -> Path:
    return runs.train("first")


def push(run: Path, *words: object) -> int:
    return main(["push", str(run), *map(str, words)])


def test_the_card_says_what_was_trained_and_how_well(run: Path, tmp_path: Path) -> None:
    assert push(run, tmp_path / "out", "--base", "stabilityai/stable-diffusion-3.5-medium") == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    front, text = card.data.to_dict(), card.text
    assert front["base_model"] == "stabilityai/stable-diffusion-3.5-medium"
    assert front["base_model_relation"] == "adapter"
    assert (front["license"], front["license_name"]) == ("other", "stabilityai-ai-community")
    assert front["license_link"].endswith("LICENSE.md")
    assert front["pipeline_tag"] == "text-to-image"
    assert [shown["output"]["url"] for shown in front["widget"]] == [f"images/00{k}_after.png" for k in range(4)]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scored = [row["eval/reward/brightness"] for row in rows if "eval/reward/brightness" in row]
    name, [result] = model_index_to_eval_results(front["model-index"])
    assert name == "first"
    assert result.metric_value == scored[-1]
    assert result.metric_args is not None
    assert result.metric_args["before_training"] == scored[0]
    assert result.metric_args["low"] < scored[-1] < result.metric_args["high"]
    for words in ("no trigger word", "Powered by Stability AI", "paired difference", f"{scored[0]:.3f} (95 %",
                  "two old chairs \\| pipes &lt;b>", "brightness.py", "sha256", "| `optim.lr` | 0.01 |",
                  "StableDiffusion3Pipeline", "LoraLoaderModelOnly", "commit of flowrl", "prompts.txt"):  # fmt: skip
        assert words in text, words


def test_the_folder_holds_what_was_listed_and_stock_loads_it(
    run: Path, runs: TinyRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert push(run, out, "--dry-run") == 0
    listed = capsys.readouterr().out
    assert "nothing was written or sent" in listed
    assert not out.exists()
    assert push(run, out, "--pairs", 1) == 0
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert names == [
        "README.md", "comfyui/first_comfyui.safetensors", "config.yaml", "images/000_after.png",
        "images/000_before.png", "pytorch_lora_weights.safetensors",
    ]  # fmt: skip
    assert all(name in listed for name in names)
    rows = re.findall(r"^  (\S+) +([\d.]+) (B|kB|MB)$", capsys.readouterr().out, flags=re.M)
    sizes = {name: float(number) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit] for name, number, unit in rows}
    assert sizes == {name: pytest.approx((out / name).stat().st_size, abs=60) for name in names}
    pipe: Any = StableDiffusion3Pipeline.from_pretrained(runs.folder / "model")
    pipe.load_lora_weights(out, weight_name="pytorch_lora_weights.safetensors")
    pipe.unload_lora_weights()
    pipe.load_lora_weights(out / "comfyui", weight_name="first_comfyui.safetensors")


def test_nothing_tells_where_it_was_made(run: Path, runs: TinyRuns, tmp_path: Path) -> None:
    assert push(run, tmp_path / "out") == 0
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            assert str(runs.folder).encode() not in path.read_bytes(), path
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert config["pipeline"]["model"] == "\u2026/model"
    assert config["optim"]["lr"] == 0.01
    with safe_open(tmp_path / "out" / "pytorch_lora_weights.safetensors", framework="pt") as file:
        assert set(file.metadata()) == {"format", "lora_adapter_metadata"}


def test_places_and_secrets_are_taken_out() -> None:
    said = "flowrl train /home/ann/x.yaml out=/data/runs/a url=http://me:pw@10.0.0.1:8/v1 ~/b/c.txt 1/2 a/b asset:x/y"
    assert without_places(said) == "flowrl train \u2026/x.yaml out=\u2026/a url=ADDRESS \u2026/c.txt 1/2 a/b asset:x/y"
    assert without_places(f"token hf_{'a' * 30}") == "token SECRET"
    nested = {"options": {"api_key": "abc", "url": "https://x.y/z", "n": 3}, "list": ["/a/b"]}
    assert settings_without_places(nested) == {
        "options": {"api_key": "SECRET", "url": "ADDRESS", "n": 3}, "list": ["\u2026/b"]
    }  # fmt: skip


def test_what_cannot_be_shared_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("# mine\n")
    assert push(run, tmp_path) == 1
    said = capsys.readouterr()
    assert "will not be overwritten" in said.err
    assert "shared of" not in said.out, "nothing was"
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    out = tmp_path / "out"
    assert push(run, out, "--to", "me/first") == 1
    assert "there is no token: set HF_TOKEN" in capsys.readouterr().err
    for name in ("./first", "first", "", "a/b/c"):
        assert push(run, out, "--dry-run", "--to", name) == 1
        assert f"OWNER/NAME such as me/foxes, got '{name}'" in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert push(run, out, "--to", "me/first") == 1
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
    assert push(run, out, "--public") == 1
    assert "say where to with --to" in capsys.readouterr().err
    assert not out.exists()


def test_every_licence_of_a_published_model_has_terms() -> None:
    assert {known.licence for known in checkpoints().values()} >= set(TERMS)
    for model in checkpoints():
        terms = terms_of(model)
        assert terms is not None
        assert terms.demands
        assert (terms.hub == "other") == (terms.name is not None)
    assert terms_of("somebody/unknown") is None


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload of small files asks for."""

    def log_message(self, *given: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        there = self.server.private  # type: ignore[attr-defined]
        self._send(404 if there is None else 200, {"id": "me/first", "private": there, "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        server: Any = self.server
        server.asked.append((self.path, self.headers.get("Authorization")))
        if self.path.endswith("/repos/create"):
            server.private = json.loads(body)["visibility"] == "private"
            self._send(200, {"url": "https://huggingface.co/me/first"})
        elif self.path.endswith("/validate-yaml"):
            self._send(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for file in json.loads(body)["files"]]  # fmt: skip
            self._send(200, {"files": files})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    server.held[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = "https://huggingface.co/me/first/commit/0"
            self._send(200, {"commitUrl": url, "commitOid": "0", "success": True})
        else:
            self._send(404, {})

    def _send(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.private, server.asked, server.held = None, [], {}
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_ofthetest")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_upload_sends_the_listed_files_and_is_private(
    run: Path, tmp_path: Path, hub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (tmp_path / "out", "--to", "me/first", "--base", "Qwen/Qwen-Image", "--pairs", 1)
    assert push(run, *command, "--dry-run") == 0
    assert hub.asked == []
    assert push(run, *command) == 0, capsys.readouterr().err
    assert hub.private is True
    held = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert set(hub.held) == held
    assert all((tmp_path / "out" / name).read_bytes() == content for name, content in hub.held.items())
    assert {token for _, token in hub.asked} == {"Bearer hf_ofthetest"}
    assert push(run, *command) == 1
    assert "is there already: --update" in capsys.readouterr().err
    hub.private = False
    assert push(run, *command, "--update") == 1
    assert "is public: say --public" in capsys.readouterr().err


def test_without_a_known_licence_nothing_is_uploaded(
    run: Path, tmp_path: Path, hub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(run, tmp_path / "out", "--to", "me/first") == 1
    assert "state that of the LoRA with --licence" in capsys.readouterr().err
    assert hub.asked == []
    assert not (tmp_path / "out").exists()


def test_the_commands_merge_and_export_take_a_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", str(run), str(tmp_path / "merged")]) == 0
    assert "15 layers changed, in float32" in capsys.readouterr().out
    assert (tmp_path / "merged" / "model_index.json").is_file()
    drawn, merged = find_source(str(run)), find_source(str(tmp_path / "merged"))
    assert merged.sampling == drawn.sampling  # steps and guidance of its evaluations, not the family's own
    assert (merged.num_steps, merged.guidance_scale) == (drawn.num_steps, drawn.guidance_scale)
    assert main(["merge", str(run), str(tmp_path / "merged")]) == 1
    assert "exists already" in capsys.readouterr().err
    for given, said in [
        ((run, tmp_path / "b", "--also", run, "--weights", "nan", "1"), "finite and not all 0, got [nan, 1.0]"),
        ((run, tmp_path / "b", "--weights", "0"), "not all 0, got [0.0]"),
        ((run, tmp_path / "b", "--weights", "1", "2"), "the 1 LoRAs, finite and not all 0, got [1.0, 2.0]"),
        ((tmp_path, tmp_path / "b"), f"{tmp_path} has no LoRA: give a run folder"),
        ((run, tmp_path / "b", "--base", "asset:tiny-kontext"), "tiny-kontext"),
    ]:
        assert main(["merge", *map(str, given)]) == 1
        assert said in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "b").exists()
    assert main(["export", str(run), "--format", "kohya"]) == 1
    assert "not written for sd3" in capsys.readouterr().err
    assert main(["export", str(run), "--format", "peft", "--out", str(tmp_path / "my.safetensors")]) == 1
    assert (
        f"--out is the folder of the files, whose names follow from the form: give {tmp_path}"
        in capsys.readouterr().err
    )
    text = (run / "config.yaml").read_text().replace("quantize: none", "quantize: int8")
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "lora").symlink_to(run / "lora")
    assert main(["merge", str(tmp_path), str(tmp_path / "other")]) == 1
    assert "over weights in int8" in capsys.readouterr().err
    assert main(["merge", str(tmp_path), str(tmp_path / "other"), "--unquantised"]) == 0
