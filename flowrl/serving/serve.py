"""Serves rewards over HTTP until a signal."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch

from flowrl.config.options import build_options
from flowrl.generation.drawing import find_device
from flowrl.generation.models import several
from flowrl.generation.named_rewards import reward_label, reward_list
from flowrl.rewards.base.specs import validate_reward_specs
from flowrl.rewards.serving import server
from flowrl.rewards.serving.front_door import make_door
from flowrl.runtime.placement import torch_threads
from flowrl.runtime.public import public
from flowrl.runtime.scrubbing import remember_secret
from flowrl.runtime.scrubbing import say as print
from flowrl.serving.environments import Environments, has_places
from flowrl.serving.served import Rows, ServerSettings, load_app, threads_of


@public
def serve(rewards: str | Sequence[str], *, show: bool = True, **settings: Any) -> None:
    """Loads rewards and serves them over HTTP until a signal, then stops gracefully and returns.

    Args:
        rewards: names, or one YAML file with a list `rewards:`.
        show: print its addresses and rewards.
        **settings: fields of `flowrl.serving.served.ServerSettings`: `port=8000`, `replicas=2`.

    Raises:
        ValueError: names, options, token or port are wrong, or a package is missing; no weights were loaded.
    """
    asked = build_options(ServerSettings, settings, owner="serve")
    specs = reward_list(several(rewards))
    token = os.environ.get(asked.token_env or "", "").strip() or None
    if asked.token_env is not None and token is None:
        raise ValueError(f"`token_env`: the environment variable {asked.token_env} is not set: put the token there.")
    if token is not None:
        remember_secret(token)
    server.check_extra()
    devices = devices_of(asked)
    apart = has_places(specs)
    if not apart:
        validate_reward_specs(specs)
    environments = Environments(asked, specs, devices) if apart or asked.replicas > 1 else None
    with server.open_socket(asked.host, asked.port, has_token=token is not None) as bound:
        start = time.monotonic()
        if not apart:
            where = ", ".join(map(str, dict.fromkeys(devices)))
            copies = f", {asked.replicas} times" if asked.replicas > 1 else ""
            print(f"Loading {', '.join(reward_label(spec) for spec in specs)} on {where}{copies} ...", flush=True)
        if environments is None:
            with torch_threads(threads_of(asked)):
                app, rows = load_app(asked, specs, devices[0], token)
                _listen(asked, bound, rows, time.monotonic() - start)
                server.make_server(app, grace=asked.grace).run(sockets=[bound])
        else:
            with environments:
                for child in environments.children if apart else ():
                    print(f"Starting {child.label} with {child.command[0]} ...", flush=True)
                _listen(asked, bound, environments.start(), time.monotonic() - start)
                door = make_door(
                    environments.backends, inner=environments.token, token=token, limits=asked.limits, hosts=asked.hosts
                )
                server.make_server(door, grace=asked.grace).run(sockets=[bound])
    print("Stopped.", flush=True)


def devices_of(asked: ServerSettings) -> list[torch.device]:
    """The device of each replica: those of `devices` in turn, or `device`, or all GPUs in turn, or the CPU. Raises
    ValueError: a device does not exist, or both are given."""
    if asked.devices is not None and asked.device is not None:
        raise ValueError("give `device` for one process or for all of them, or `devices` for each, not both.")
    if asked.devices is not None:
        names = [name.strip() for name in asked.devices.split(",")]
        if not all(names):
            raise ValueError(f"`devices` is a list such as cuda:0,cuda:1, got {asked.devices!r}.")
        if len(names) > asked.replicas:
            there = "is 1 replica" if asked.replicas == 1 else f"are {asked.replicas} replicas"
            raise ValueError(
                f"`devices` names {len(names)} devices and there {there}: give `replicas` "
                f"{len(names)}, or fewer devices."
            )
        found = [find_device(name, "`devices` ") for name in names]
    elif asked.replicas > 1 and asked.device in (None, "auto", "cuda") and torch.cuda.is_available():
        found = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    else:
        found = [find_device(asked.device)]
    return [found[i % len(found)] for i in range(asked.replicas)]


def _listen(asked: ServerSettings, bound: socket.socket, rows: Rows, seconds: float) -> None:
    """Listens, and prints addresses, rewards and the line for a configuration."""
    bound.listen(2048)  # before the address is told: who asks at once waits until it is served
    host, port = bound.getsockname()[:2]
    at = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"Serving at {at} after {seconds:.1f} s; Ctrl-C stops.")
    for name, kind, needs, version in rows:
        print(f"  {name} ({kind}; needs {needs}): {version}")
    asks = f", token_env: {asked.token_env}" if asked.token_env else ""
    which = f", reward: {rows[0][0]}" if len(rows) > 1 else ""
    print(f"In a configuration: {{name: remote, options: {{url: '{at}'{which}{asks}}}}}", flush=True)
