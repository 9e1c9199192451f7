"""A reference engine for `workers.engine`: a server in a process of its own that draws with the stock pipeline.

    flowrl train CONFIG workers.rollouts=1 workers.engine=docs/engines/stock_engine.py

`Engine` is the client: it starts its server on this machine. `serve` is the server. An engine of your own keeps
`Engine`'s three methods; how it talks to its server is its own affair. Here it is HTTP, with tensors by name in torch's
format, which are read with `weights_only=True`:

| request | body | answer |
|---|---|---|
| POST /weights | the LoRA's tensors | nothing |
| POST /draw | `cond/NAME`, `start`, `noise/STEP`, `sigma`, `timestep`, `numbers` | `states` |

`numbers` are the guidance scale, the kernel's noise level and its sigma_max.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
from torch import Tensor

from flowrl.config.train import TrainConfig
from flowrl.pipelines.weights.loading_choices import Loading
from flowrl.samplers import KERNELS
from flowrl.samplers.step import advance, euler
from flowrl.training.parts import init_lora, load_pipeline, load_policy
from flowrl.training.prompting import guided
from flowrl.trajectory import Conditioning
from flowrl.workers.engine import EngineRequest

SECONDS = 3600.0  # that a request may take


class Engine:
    """Draws through a server that it starts and that ends with it."""

    def load(self, config: TrainConfig) -> None:
        """Starts the server and waits until the model is there. Raises RuntimeError: it ended before."""
        if config.sampler.noise_levels is not None or config.sampler.calibration.iterations:
            raise ValueError("stock_engine.py draws with one noise level: remove sampler.noise_levels and calibration")
        self.kernel = config.sampler.kernel
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        pickle.dump((config, torch.get_num_threads()), self.server.stdin)  # to a child of ours, not over a network
        self.server.stdin.flush()
        port = self.server.stdout.readline().decode().strip()
        if not port:
            raise RuntimeError(f"the server of stock_engine.py ended with {self.server.wait()}; its words are above")
        self.address = f"http://127.0.0.1:{port}"

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Sends the LoRA."""
        self._ask("weights", dict(weights))

    def draw(self, asked: EngineRequest) -> Tensor:
        """Sends what is asked for; the states."""
        kernel, schedule = asked.kernel, asked.schedule
        numbers = torch.tensor([asked.guidance_scale, kernel.noise_level, float(kernel.sigma_max)], dtype=torch.float64)
        body = {"start": asked.start, "sigma": schedule.sigma, "timestep": schedule.timestep, "numbers": numbers}
        body |= {f"cond/{name}": tensor for name, tensor in asked.cond.items()}
        body |= {f"noise/{step}": tensor for step, tensor in asked.noise.items()}
        return self._ask("draw", body)["states"]

    def _ask(self, what: str, body: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with urllib.request.urlopen(f"{self.address}/{what}", data=_bytes_of(body), timeout=SECONDS) as answer:
            found: dict[str, Tensor] = torch.load(io.BytesIO(answer.read()), weights_only=True)
        return found

    def __del__(self) -> None:
        if (server := getattr(self, "server", None)) is not None:
            server.kill()
            server.communicate()


class Stock:
    """The stock pipeline with the LoRA that is trained."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.pipeline = load_pipeline(config.pipeline, self.device, Loading(later=True))
        self.pipeline.load_denoiser()
        self.pipeline.free_text_encoders()
        self.policy = load_policy(config, self.pipeline, init_lora(config))

    @torch.no_grad()
    def draw(self, asked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """States of all steps: those with noise by the kernel, the others by Euler's rule."""
        scale, noise_level, sigma_max = asked["numbers"].tolist()
        kernel = replace(KERNELS[self.config.sampler.kernel], noise_level=noise_level, sigma_max=sigma_max)
        sigma, timestep, x = asked["sigma"], asked["timestep"], asked["start"].to(self.device)
        named = {n.removeprefix("cond/"): tensor for n, tensor in asked.items() if n.startswith("cond/")}
        cond = Conditioning(named).to(self.device)
        pipeline = self.pipeline
        velocity = guided(pipeline, pipeline.network, cond, scale, self.config.sampler.train_negative)
        states = [x.cpu()]
        for step in range(len(timestep)):
            predicted, levels = velocity(x, sigma[step], timestep[step]), (sigma[step], sigma[step + 1])
            noise = asked.get(f"noise/{step}")
            if noise is None:
                x = euler(x, predicted, *levels)
            else:
                x = advance(kernel, x, predicted, *levels, noise.to(self.device)).x_next
            states.append(x.cpu())
        return {"states": torch.stack(states, 1)}


def serve(config: TrainConfig) -> None:
    """Serves one client, on a free port of this machine, which is printed once the model is there."""
    stock = Stock(config)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked: dict[str, Tensor] = torch.load(io.BytesIO(body), weights_only=True)
            found: dict[str, Tensor] = {}
            if self.path == "/weights":
                stock.policy.load(asked)
            else:
                found = stock.draw(asked)
            answer = _bytes_of(found)
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


def _bytes_of(tensors: Mapping[str, Tensor]) -> bytes:
    stream = io.BytesIO()
    torch.save(dict(tensors), stream)
    return stream.getvalue()


if __name__ == "__main__":
    given, threads = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    serve(given)
