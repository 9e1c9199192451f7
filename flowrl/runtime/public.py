"""Functions of the Python interface: how they are called by users and by commands, and how their errors are told."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from flowrl.runtime.call import answering, call_text, within_call
from flowrl.runtime.failures import FlowrlError, describe_error
from flowrl.runtime.process_settings import before_libraries_load

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def public(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function of flowrl's Python interface.

    Called from a user's Python it raises every error as one paragraph (`FlowrlError`) and is told of as the Python call
    that it is. Called by the command line, or by another such function, it is a part of that call. `show=False` among
    its arguments silences its progress and notes, and nothing else of the process.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        show = kwargs.get("show", True) is not False
        if within_call():
            with answering(show=show):
                return function(*args, **kwargs)
        before_libraries_load()
        bound = signature.bind(*args, **kwargs).arguments
        given = {key: value for key, value in bound.items() if key not in ("page", "fit")}  # handed in, not asked for
        with answering(call_text(function.__name__, given), show=show):
            try:
                return function(*args, **kwargs)
            except FlowrlError:
                raise
            except (ValueError, OSError) as error:  # bad input: told without the frames that found it
                raise FlowrlError(describe_error(error)) from error.__cause__
            except (Exception, SystemExit) as error:
                raise FlowrlError(describe_error(error)) from error

    return call
