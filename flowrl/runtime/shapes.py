"""Annotations of arrays with their shapes: jaxtyping's where it is installed, as it is where tests check every call.

Elsewhere they are for who reads them, and each is the class of array that it names: `Float[Tensor, " b"]` is `Tensor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64, Int, Int32, Int64, Shaped, UInt8
else:
    try:
        from jaxtyping import Bool, Float, Float64, Int, Int32, Int64, Shaped, UInt8
    except ModuleNotFoundError:

        class _Array:
            def __class_getitem__(cls, given: tuple[Any, str]) -> Any:
                return given[0]

        Bool = Float = Float64 = Int = Int32 = Int64 = Shaped = UInt8 = _Array

__all__ = ["Bool", "Float", "Float64", "Int", "Int32", "Int64", "Shaped", "UInt8"]
