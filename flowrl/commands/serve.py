"""`flowrl serve`: serves rewards over HTTP until Ctrl-C; see docs/serving.md."""

from __future__ import annotations

import argparse

import flowrl
from flowrl.commands.sampling_arguments import add_batch_size, add_count, add_device, add_several, seconds, threads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl serve` takes."""
    parser.description = "Serve rewards over HTTP until Ctrl-C, for runs on other machines. See docs/serving.md."
    add = parser.add_argument
    add("rewards", nargs="+", metavar="REWARD|CONFIG", help="names, FILE.py:FUNCTION, or YAML with a list rewards:")
    add("--host", default="127.0.0.1", metavar="NAME", help="address to listen at (default: 127.0.0.1, this machine)")
    add("--port", type=int, default=8190, metavar="N", help="port, 0 for a free one (default: 8190)")
    add_several(
        parser, "--allow-host", "NAME", "a name besides localhost that clients may use for a server without token"
    )
    add("--token-env", metavar="NAME", help="environment variable with the token that clients must send")
    add(
        "--threads",
        type=threads,
        metavar="N",
        help="CPU threads of torch (default: half of the cores, shared by the replicas)",
    )
    add_count(parser, "--replicas", 1, "processes, each with a copy of the rewards, behind one port")
    add("--devices", metavar="NAMES", help="devices of the replicas in turn: cuda:0,cuda:1 (default: all GPUs, or cpu)")
    add_count(parser, "--queue-size", 1024, "images per reward that may wait")
    add_count(parser, "--max-items", 256, "images per request")
    add_count(parser, "--max-mib", 64, "MiB per request")
    add_count(parser, "--max-mpixels", 64, "million pixels per request")
    add_count(parser, "--max-images", 4096, "images and frames per request, of any size")
    add_count(parser, "--max-connections", 256, "connections per address")
    add_count(parser, "--max-video-mib", 256, "MiB per request with videos")
    add_count(parser, "--max-video-mpixels", 128, "million pixels per video")
    add(
        "--grace",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="time to finish what was accepted, after Ctrl-C (default: 30)",
    )
    add_batch_size(parser, "16")
    add_device(parser)


def run(parsed: argparse.Namespace) -> int:
    """Serves until a signal; returns 0 after a graceful stop."""
    flowrl.serve(**vars(parsed))
    return 0
