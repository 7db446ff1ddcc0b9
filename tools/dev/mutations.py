"""Every mutant of a module's functions, each with a name that outlives changes elsewhere.

The operators are mutmut's (arithmetic, comparison, boolean, ``not``, numbers, strings, arguments
dropped or replaced by None, assignments, conditional expressions, ``break`` and ``continue``) and
two more: a call whose result nobody uses is left out, and a value to return becomes None.
Not mutated: module and class level, decorated functions (mutmut leaves them out), annotations,
docstrings, strings that hold a blank (prose), and whatever stands in a ``raise``, in a call of the
logger or in a ``cast``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation.file_mutation import Mutation, MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

LEFT_ALONE: Final = m.OneOf(
    m.Raise(),
    m.Call(func=m.Attribute(value=m.Name("logger"))),
    m.Call(func=m.Name("cast")),
)


@dataclass(frozen=True, order=True)
class SourceMutant:
    """The name of one mutant; it holds no line number."""

    function: str  # module:qualified name
    operator: str
    line: str  # the line on which the replaced code begins
    before: str
    after: str
    ordinal: int  # among those of the function that read the same

    def __str__(self) -> str:
        return f"{self.function} {self.operator}#{self.ordinal}: {self.before} -> {self.after}"


class MutatedModule:
    """The mutants of one module."""

    def __init__(self, name: str, source: str) -> None:
        wrapper = MetadataWrapper(cst.parse_module(source))
        self.module = wrapper.module
        self._operator_of: dict[cst.CSTNode, str] = {}
        nothing_ignored = IgnoredCode(set(), set(), set())
        visitor = MutationVisitor([*self._noted_operators()], nothing_ignored)
        wrapper.visit(visitor)
        self._positions = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._lines = source.splitlines()
        self._name = name
        self._mutations = dict(self._named(visitor.mutations))

    def __iter__(self) -> Iterator[SourceMutant]:
        return iter(self._mutations)

    def __contains__(self, mutant: SourceMutant) -> bool:
        return mutant in self._mutations

    def source(self, mutant: SourceMutant) -> str:
        """The module's text with this mutant in it."""
        found = self._mutations[mutant]
        changed = deep_replace(self.module, found.original_node, found.mutated_node)
        assert isinstance(changed, cst.Module)
        return changed.code

    def body_lines(self, mutant: SourceMutant) -> range:
        """The lines of its function that run when it is called, not when it is defined."""
        function = self._mutations[mutant].contained_by_top_level_function
        assert function is not None
        first = self._positions[function.body.body[0]].start.line
        return range(first, self._positions[function].end.line + 1)

    def _noted_operators(self) -> Iterator[tuple[type, Callable[[Any], Iterator[cst.CSTNode]]]]:
        own = ((cst.Expr, operator_call_removal), (cst.Return, operator_return))
        for kind, operator in (*mutation_operators, *own):
            yield kind, self._noted(operator)

    def _noted(self, operator: Callable[[Any], Any]) -> Callable[[Any], Iterator[cst.CSTNode]]:
        name = operator.__name__.removeprefix("operator_")

        def mutate(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
            for mutated in operator(node):
                self._operator_of[mutated] = name
                yield mutated

        return mutate

    def _named(self, mutations: list[Mutation]) -> Iterator[tuple[SourceMutant, Mutation]]:
        alike: Counter[tuple[str, ...]] = Counter()
        for found in mutations:
            node, function = found.original_node, found.contained_by_top_level_function
            if not isinstance(function, cst.FunctionDef) or self._is_left_alone(node):
                continue
            text = (
                f"{self._name}:{self._qualified(function)}",
                self._operator_of[found.mutated_node],
                self._lines[self._positions[node].start.line - 1].strip(),
                self._text(node),
                self._text(found.mutated_node),
            )
            yield SourceMutant(*text, ordinal=alike[text]), found
            alike[text] += 1

    def _is_left_alone(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.SimpleString) and " " in node.value:
            return True
        above: cst.CSTNode | None = node
        while above is not None:
            if m.matches(above, LEFT_ALONE):
                return True
            above = self._parents.get(above)
        return False

    def _qualified(self, function: cst.FunctionDef) -> str:
        above = self._parents.get(self._parents[function])
        owner = f"{above.name.value}." if isinstance(above, cst.ClassDef) else ""
        return owner + function.name.value

    def _text(self, node: cst.CSTNode) -> str:
        return " ".join(self.module.code_for_node(node).split())


def operator_call_removal(node: cst.Expr) -> Iterator[cst.Expr]:
    if isinstance(node.value, cst.Call):
        yield node.with_changes(value=cst.Ellipsis())


def operator_return(node: cst.Return) -> Iterator[cst.Return]:
    if node.value is not None and not m.matches(node.value, m.Name("None")):
        spaced = cst.SimpleWhitespace(" ")
        yield node.with_changes(value=cst.Name("None"), whitespace_after_return=spaced)
