"""Configurations that are Python functions over a ConfigDict: read as syntax trees, never run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flowrl.config.spelling import closest
from flowrl.runtime.syntax import parse_python

_DEEPEST = 20
_MOST = 10_000  # lines that are followed: a loop may have no end
_LONGEST = 100_000  # characters of a value: a few lines can double one without end
_SUMS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
_CALLS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "max": max, "min": min, "round": round}


def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    """The functions of a file. Raises ValueError: it is not Python."""
    try:
        body = parse_python(path.read_text(encoding="utf-8")).body
    except SyntaxError as error:
        raise ValueError(f"{path} is not Python: line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError):  # no text, a null byte, or nested without end
        raise ValueError(f"{path} is not Python") from None
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def makers_in(path: Path) -> list[str]:
    """The functions without arguments in a file, which may make configurations. Raises ValueError: it is not Python."""
    return [name for name, node in functions_of(path).items() if not node.args.args]


def choose_function(path: Path, name: str | None) -> str:
    """The named function, or the only one without arguments. Raises ValueError: none, or several, which it names."""
    plain = makers_in(path)
    if name in plain:
        return name
    if not plain:
        raise ValueError(f"{path} has no function without arguments that makes a configuration, as flow_grpo's have")
    if name is None and len(plain) == 1:
        return plain[0]
    near = closest(name, plain) if name else None
    asked = f"has no function '{name}'" if name else f"holds {len(plain)} configurations"
    hint = f"did you mean {path}:{near}?" if near else f"name one, such as {path}:{plain[0]}."
    raise ValueError(f"{path} {asked}; {hint} There are {', '.join(plain)}")


@dataclass(slots=True)
class Reader:
    """Follows a function's assignments, choices and loops."""

    path: Path
    said: set[str] = field(default_factory=set)
    """Dotted keys that the file's own functions set; others come from files that they call."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Local names of numbers in its functions, such as gpu_number."""
    depth: int = 0
    lines: int = 0

    def call(self, path: Path, name: str, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """The configuration that ``name(...)`` of a file returns, as nested mappings. Raises ValueError: a line is more
        than values, attributes, sums and choices of them, or a called function is missing."""
        functions = functions_of(path)
        if name not in functions:
            raise ValueError(f"{path} has no function '{name}', which {self.path} calls")
        self.depth += 1
        if self.depth > _DEEPEST:
            raise ValueError(f"{self.path}: its functions call each other more than {_DEEPEST} deep")
        taken = functions[name].args
        usual = zip(taken.args[::-1], taken.defaults[::-1], strict=False)
        names = {**{one.arg: self._value(value, {}, path) for one, value in usual}, **given}
        found = self._follow(functions[name].body, names, path)
        if not isinstance(found, dict):
            raise ValueError(f"{path}: {name}() returns no configuration")
        self.depth -= 1
        self.numbers |= {key: v for key, v in names.items() if isinstance(v, int)}
        return found

    def _follow(self, body: Iterable[ast.stmt], names: dict[str, Any], path: Path) -> Any:
        """Returns what a body returns: None if it ends, `ast.Break` if it leaves its loop."""
        for line in body:
            self.lines += 1
            if self.lines > _MOST:
                raise ValueError(f"{self.path}: more than {_MOST:,} lines of it would be followed: has it no end?")
            found = None
            match line:
                case ast.Return(value=ast.expr() as value):
                    return self._value(value, names, path)
                case ast.Assign(targets=targets, value=value):
                    self._assign(line, targets, self._value(value, names, path), names, path)
                case ast.AugAssign(target=ast.Name() as target, op=op, value=value):
                    made = ast.BinOp(left=ast.Name(target.id), op=op, right=value)
                    self._assign(line, [target], self._value(ast.copy_location(made, line), names, path), names, path)
                case ast.If() | ast.While(orelse=[]):
                    found = self._branch(line, names, path)
                case ast.Break():
                    return ast.Break
                case ast.Assert() | ast.Pass() | ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    raise _refusal(path, line)
            if found is not None:
                return found
        return None

    def _branch(self, line: ast.If | ast.While, names: dict[str, Any], path: Path) -> Any:
        if isinstance(line, ast.If):
            return self._follow(line.body if self._value(line.test, names, path) else line.orelse, names, path)
        found = None
        while found is None and self._value(line.test, names, path):
            found = self._follow(line.body, names, path)
        return None if found is ast.Break else found

    def _assign(
        self, line: ast.stmt, targets: Iterable[ast.expr], value: Any, names: dict[str, Any], path: Path
    ) -> None:
        try:
            is_short = len(repr(value)) <= _LONGEST
        except (ValueError, RecursionError):  # a number of thousands of digits, or nested without end
            is_short = False
        if not is_short:
            raise _refusal(path, line)
        for target in targets:
            if isinstance(target, ast.Name):
                names[target.id] = value
            elif isinstance(target, ast.Attribute):
                section = self._value(target.value, names, path)
                if not isinstance(section, dict):
                    raise _refusal(path, line)
                section[target.attr] = value
                if path == self.path:
                    self.said.add(ast.unparse(target).partition(".")[2])
            else:
                raise _refusal(path, line)

    def _value(self, node: ast.expr, names: dict[str, Any], path: Path) -> Any:
        try:
            return self._evaluate(node, names, path)
        except (KeyError, TypeError, ArithmeticError, RecursionError):
            raise _refusal(path, node) from None

    def _evaluate(self, node: ast.expr, names: dict[str, Any], path: Path) -> Any:
        def of(inner: ast.expr) -> Any:
            return self._evaluate(inner, names, path)

        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return names[node.id]
            case ast.Attribute():
                return of(node.value)[node.attr]
            case ast.List() | ast.Tuple():
                return list(map(of, node.elts))
            case ast.Dict():
                return {of(key): of(item) for key, item in zip(node.keys, node.values, strict=True) if key is not None}
            case ast.UnaryOp(op=ast.USub()):
                return -of(node.operand)
            case ast.BinOp():
                sides = of(node.left), of(node.right)
                if type(node.op) in _SUMS and _are_numbers(sides):
                    return _SUMS[type(node.op)](*sides)
            case ast.JoinedStr():
                return "".join(map(str, map(of, node.values)))
            case ast.FormattedValue():
                return of(node.value)
            case ast.Call():
                named = {one.arg: of(one.value) for one in node.keywords if one.arg is not None}
                return self._evaluate_call(node, list(map(of, node.args)), named, path)
        return self._choose(node, of, path)

    def _choose(self, node: ast.expr, of: Callable[[ast.expr], Any], path: Path) -> Any:
        """A value that is chosen or compared."""
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
                return _COMPARED[type(op)](of(left), of(right))
            case ast.BoolOp(op=op, values=values):
                return (all if isinstance(op, ast.And) else any)(map(of, values))
            case ast.IfExp(test=test, body=body, orelse=other):
                return of(body) if of(test) else of(other)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not of(operand)
        raise _refusal(path, node)

    def _evaluate_call(self, node: ast.Call, given: list[Any], named: dict[str, Any], path: Path) -> Any:
        name = ast.unparse(node.func)
        if name.endswith("ConfigDict"):
            return dict(*given, **named)
        if name == "os.getcwd":
            return "."
        if name == "os.path.join":
            return "/".join(part for part in given if part != ".")
        if name in _CALLS and _are_numbers(given):
            return _CALLS[name](*given)
        module, _, function = name.rpartition(".")
        if given or (not module.replace("_", "").isalnum() and module):
            raise _refusal(path, node)
        file = path.with_name(f"{module}.py") if module else path
        if not file.is_file():
            raise ValueError(f"{path} calls {name}(), and there is no {file.name} beside it: put it there")
        return self.call(file, function, named)


def _refusal(path: Path, node: ast.AST) -> ValueError:
    """The refusal of a line that cannot be read."""
    return ValueError(
        f"{path} is read, never run: line {getattr(node, 'lineno', '?')}, '{ast.unparse(node)[:60]}', is more than "
        "values, attributes, sums and choices of them; write the value that it comes to"
    )


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, (int, float)) for value in values)
