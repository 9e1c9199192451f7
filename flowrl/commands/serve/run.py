"""`flowrl serve`: rewards behind HTTP, until Ctrl-C; see docs/serving.md."""

from __future__ import annotations

import argparse
import os
import socket
import time
from typing import Any

import torch

from flowrl.generation.drawing import find_device
from flowrl.generation.named_rewards import reward_label, reward_list
from flowrl.rewards.base.specs import validate_reward_specs
from flowrl.rewards.serving import server
from flowrl.rewards.serving.front_door import make_door
from flowrl.runtime.scrubbing import remember_secret
from flowrl.runtime.scrubbing import say as print
from flowrl.serving.environments import Environments, has_places
from flowrl.serving.replicas import Replicas
from flowrl.serving.served import Rows, hosts_of, limits_of, load_app


def run(parsed: argparse.Namespace) -> int:
    """Loads rewards and serves them until a signal; returns 0 after a graceful stop.

    Args:
        parsed: `rewards`, names or one YAML file with a list `rewards:`; `host`, `port`, `token_env`, `device`,
            `devices`, `replicas`, `threads`, `batch_size`, `queue_size`, `max_items`, `max_mib`, `max_mpixels`,
            `max_images`, `max_connections`, `allow_host`, `grace`.

    Raises:
        ValueError: before any weights load for what can be known then: names, options, token, port, a missing package.
    """
    specs = reward_list(parsed.rewards)
    token = _token(parsed.token_env)
    server.check_extra()
    devices = devices_of(parsed)
    if has_places(specs):
        return _serve_places(parsed, specs, token)
    validate_reward_specs(specs)
    bound = server.open_socket(parsed.host, parsed.port, has_token=token is not None)
    try:
        start = time.monotonic()
        where = ", ".join(map(str, dict.fromkeys(devices)))
        copies = f", {parsed.replicas} times" if parsed.replicas > 1 else ""
        print(f"Loading {', '.join(reward_label(spec) for spec in specs)} on {where}{copies} ...", flush=True)
        if parsed.replicas > 1:
            with Replicas(bound, parsed, specs, devices, token) as replicas:
                _listen(parsed, bound, replicas.start(), time.monotonic() - start)
                replicas.serve()
        else:
            app, rows = load_app(parsed, specs, devices[0], token)
            _listen(parsed, bound, rows, time.monotonic() - start)
            server.make_server(app, grace=parsed.grace).run(sockets=[bound])
    finally:
        bound.close()
    print("Stopped.", flush=True)
    return 0


def _serve_places(parsed: argparse.Namespace, specs: list[dict[str, Any]], token: str | None) -> int:
    """As `run`, for rewards in environments of their own."""
    environments = Environments(parsed, specs)
    with server.open_socket(parsed.host, parsed.port, has_token=token is not None) as bound, environments:
        start = time.monotonic()
        for child in environments.children:
            print(f"Starting {child.label} with {child.command[0]} ...", flush=True)
        rows = environments.start()
        _listen(parsed, bound, rows, time.monotonic() - start)
        door = make_door(
            environments.backends,
            inner=environments.token,
            token=token,
            limits=limits_of(parsed),
            hosts=hosts_of(parsed),
        )
        server.make_server(door, grace=parsed.grace).run(sockets=[bound])
    print("Stopped.", flush=True)
    return 0


def devices_of(parsed: argparse.Namespace) -> list[torch.device]:
    """The device of each replica: those of `--devices` in turn, else `--device`, else all GPUs in turn, or the CPU.

    Raises:
        ValueError: a device is not there, or both were given.
    """
    if parsed.devices is not None and parsed.device is not None:
        raise ValueError("give --device for one process or for all of them, or --devices for each, not both.")
    if parsed.devices is not None:
        names = [name.strip() for name in parsed.devices.split(",")]
        if not all(names):
            raise ValueError(f"--devices is a list such as cuda:0,cuda:1, got {parsed.devices!r}.")
        if len(names) > parsed.replicas:
            there = "is 1 replica" if parsed.replicas == 1 else f"are {parsed.replicas} replicas"
            raise ValueError(
                f"--devices names {len(names)} devices and there {there}: give --replicas "
                f"{len(names)}, or fewer devices."
            )
        found = [find_device(name, "--devices ") for name in names]
    elif parsed.replicas > 1 and parsed.device in (None, "auto", "cuda") and torch.cuda.is_available():
        found = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    else:
        found = [find_device(parsed.device)]
    return [found[i % len(found)] for i in range(parsed.replicas)]


def _listen(parsed: argparse.Namespace, bound: socket.socket, rows: Rows, seconds: float) -> None:
    """Listens, and says where it serves what, and the line for a configuration."""
    bound.listen(2048)  # before the address is told: who asks at once waits until it is served
    host, port = bound.getsockname()[:2]
    at = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"Serving at {at} after {seconds:.1f} s; Ctrl-C stops.")
    for name, kind, needs, version in rows:
        print(f"  {name} ({kind}; needs {needs}): {version}")
    asks = f", token_env: {parsed.token_env}" if parsed.token_env else ""
    which = f", reward: {rows[0][0]}" if len(rows) > 1 else ""
    print(f"In a configuration: {{name: remote, options: {{url: '{at}'{which}{asks}}}}}", flush=True)


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"--token-env: the environment variable {variable} is not set: put the token there.")
    remember_secret(token)
    return token
