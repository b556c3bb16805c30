"""SQL92 filters over message properties (``SqlFilter``, ``SelectorParser``), compiled from text to a condition.

The grammar in ``sql92.lark`` compiles an expression once into nested functions of the raw property string. An
evaluation reads only the properties in the expression. The result is True, False or None (unknown). A message is
delivered only if the result is True. A message that cannot be evaluated (``price > 5`` for price ``cheap``) is not
delivered.

The behaviour is that of the reference, with its oddities (behaviour.md §6.4, §6.5):

- Every property is a text. In a comparison with a number, the text is parsed as the Java type of the *number*, and 5.0
  is not an integer.
- The parser stops without an error at the first token that cannot follow, so ``a > 5)`` means ``a > 5``.
- A property alone is never true.

Numbers in property texts are parsed like ``Integer.parseInt``, ``Long.parseLong`` and ``Double.valueOf``. Each result
is an integer with the order of its Java type, so that one comparison serves all types. Doubles have the order of
``Double.compare``: -0.0 < 0.0, and NaN is greater than infinity and equal to itself.

The limits are `EXPRESSION_CHARACTERS_MAX` and `DEPTH_MAX`. In the reference the Java stack is the limit.
Source: behaviour.md §6.2–§6.5, store.md §17.2.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import mmh3

from rmqkit.protocol.properties import find_property

if TYPE_CHECKING:
    from lark import Lark, UnexpectedToken

_I32_END, _I64_END = 1 << 31, 1 << 63
_ASTRAL = "\U00010000-\U0010ffff"
_INTEGER = re.compile(rf"[+-]?(?:(?![{_ASTRAL}])\d)+")  # digits of any script, one UTF-16 unit each
_DOUBLE = re.compile(
    r"[\0- ]*(?:"
    r"(?P<name>[+-]?(?:NaN|Infinity))|"
    r"(?P<digits>[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)[fFdD]?|"
    r"(?P<hex>[+-]?0[xX](?:[\da-fA-F]+\.?|[\da-fA-F]*\.[\da-fA-F]+)[pP][+-]?\d+)[fFdD]?"
    r")[\0- ]*",
    re.ASCII,
)
_F64, _I64 = struct.Struct(">d"), struct.Struct(">q")


def parse_int(text: str) -> int:
    """Parse a 32-bit integer. Raises ValueError: the text is not a 32-bit integer."""
    return _integer(text, _I32_END)


def parse_long(text: str) -> int:
    """Parse a 64-bit integer. Raises ValueError: the text is not a 64-bit integer."""
    return _integer(text, _I64_END)


def parse_double(text: str) -> int:
    """Parse a double and return its `sortable` form. Raises ValueError: the text is not a double."""
    match = _DOUBLE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a double")
    if hexadecimal := match["hex"]:
        try:
            return sortable(float.fromhex(hexadecimal))
        except OverflowError:
            return sortable(float("-inf" if hexadecimal[0] == "-" else "inf"))
    return sortable(float(match["name"] or match["digits"]))


def sortable(number: float) -> int:
    """Return an integer for a double. These integers have the order of ``Double.compare``."""
    if number != number:
        return _I64_END
    bits: int = _I64.unpack(_F64.pack(number))[0]
    return bits if bits >= 0 else -_I64_END - bits - 1


def _integer(text: str, end: int) -> int:
    if _INTEGER.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not an integer")
    number = int(text)
    if not -end <= number < end:
        raise ValueError(f"{text!r} does not fit")
    return number


EXPRESSION_CHARACTERS_MAX = 16_384
DEPTH_MAX = 200
_STACK_MAX = 500
"""The maximum number of parentheses and signs that are open in the parser at the same time."""
_CACHED_MAX = 256

T = TypeVar("T")
Value = str | int | float | bool | None
Condition = Callable[[bytes], bool | None]
Order = Callable[[int, int], bool]

_ORDERS: dict[str, Order] = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_TURNED = {">": "<", ">=": "<=", "<": ">", "<=": ">="}
_TEXT_TESTS: dict[str, Callable[[str, str], bool]] = {
    "CONTAINS": operator.contains,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}
_CONSTANTS = {"TRUE": True, "FALSE": False, "NULL": None}


class ExpressionRejected(ValueError):
    """An SQL92 expression does not compile. The text of the error is the reference's text, if the reference has one."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled expression.
    ``text``: the source text.
    ``evaluate``: returns True, False or None for a property string. Raises ValueError: a value cannot be parsed."""

    text: str
    evaluate: Condition
    _term: _Term | None = None

    def matches(self, properties: bytes) -> bool:
        """Return True if the expression selects a message with this property string."""
        try:
            return self.evaluate(properties) is True  # None (unknown) does not select a message
        except ValueError:
            return False

    def explain(self, properties: bytes) -> Part:
        """Return the value of each part of the expression for a message with this property string."""
        assert self._term is not None, "compiled expressions store their terms"
        return _explained(self._term, properties)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an expression and its value for one message.

    Attributes:
        text: the text of the part, with all parentheses.
        verdict: True, False, or None if unknown; for a property alone, True if the property exists.
        value: the text of a property, or None if it is missing.
        error: the reason why the part cannot be evaluated. Unless an earlier part decides, the whole expression cannot
            be evaluated, either.
        is_property: True if the part is a property, with the result in ``value``.
        parts: the smaller parts of this part, without constants.
    """

    text: str
    verdict: bool | None
    value: str | None = None
    error: str = ""
    is_property: bool = False
    parts: tuple[Part, ...] = ()


def compile_expression(text: str) -> Expression:
    """Compile an expression, with a cache of the latest results and errors.
    Raises ExpressionRejected: the text is not SQL92, compares values that cannot be compared, or is too long or too
    deeply nested."""
    if len(text) > EXPRESSION_CHARACTERS_MAX:
        raise ExpressionRejected(f"the expression has {len(text)} characters: {EXPRESSION_CHARACTERS_MAX} are allowed")
    compiled = _compiled(text)
    if isinstance(compiled, str):
        raise ExpressionRejected(compiled)
    return compiled


def prepare() -> None:
    """Make the parser, which takes more than 0.1 s. Call this in any thread before the first expression."""
    _grammar()


def is_prepared() -> bool:
    """Return True if the parser exists. Otherwise the next expression makes the parser."""
    return _grammar.cache_info().currsize > 0


@functools.lru_cache(maxsize=_CACHED_MAX)
def _compiled(text: str) -> Expression | str:
    """Return the compiled expression, or the reason why the text does not compile."""
    try:
        term = _parse(text)
        return Expression(text, _condition(term), term)
    except ExpressionRejected as rejected:
        # Return a text: an exception in the cache would keep the frames of its traceback in memory.
        return str(rejected)


# ---- from text to terms


@functools.cache
def _grammar() -> Lark:
    """Return the parser, which `prepare` or the first expression makes. lark is imported here, because the import takes
    most of the time."""
    from lark import Lark

    options: dict[str, Any] = {"parser": "lalr", "lexer": "basic", "g_regex_flags": re.ASCII, "transformer": _Terms()}
    return Lark.open_from_package("rmqkit.filter", "sql92.lark", **options)


def _parse(text: str) -> _Term:
    """Return the term of the longest expression at the start of a text. As in the reference, an unexpected token ends
    the expression if the preceding text is a complete expression.
    Raises ExpressionRejected: there is no such expression."""
    from lark import UnexpectedCharacters, UnexpectedToken

    parser: Any = _grammar().parse_interactive(text)
    token: Any = None
    unusable: UnexpectedToken | None = None
    try:
        for token in parser.iter_parse():
            if len(parser.parser_state.value_stack) > _STACK_MAX:
                raise ExpressionRejected(f"the expression is nested too deep at column {token.column}")
    except UnexpectedCharacters as error:
        found, place = error.char, f"line {error.line}, column {error.column}"
        raise ExpressionRejected(f'Lexical error at {place}.  Encountered: "{found}" ({ord(found)})') from None
    except UnexpectedToken as error:
        unusable = error
    try:
        term: _Term = parser.feed_eof(token)
    except UnexpectedToken as at_end:
        raise ExpressionRejected(_unexpected(unusable or at_end)) from None
    return term


def _unexpected(error: UnexpectedToken) -> str:
    wanted = ", ".join(sorted(name.lstrip("_") for name in error.expected))
    found = str(error.token) or "<EOF>"
    return f'Encountered "{found}" at line {error.line}, column {error.column}. Was expecting one of: {wanted}'


@dataclass(slots=True)
class _Number:
    """A number in an expression.
    ``parse``: parses a property as the Java type of the number, and returns an integer with the order of this type.
    ``key``: the number itself as an integer with this order."""

    value: int | float
    parse: Callable[[str], int]
    key: int


@dataclass(slots=True)
class _Term:
    """A compiled part of an expression.

    Attributes:
        text: the text of the term in errors and explanations.
        value: returns the value of the term for a property string.
        condition: returns True, False or None for a property string; None if the term cannot be a condition.
        number: the number, or None if the term is not a number.
        is_orderable: True if the term can be an operand of ``>``, ``<``, ``>=`` or ``<=``.
        is_literal: True if the term is a constant without a sign.
        depth: the depth of nested calls in an evaluation.
        parts: the smaller terms of the term.
    """

    text: str
    value: Callable[[bytes], Value]
    condition: Condition | None = None
    number: _Number | None = None
    is_property: bool = False
    is_orderable: bool = False
    is_literal: bool = False
    depth: int = 1
    parts: tuple[_Term, ...] = ()


def _explained(term: _Term, properties: bytes) -> Part:
    parts = tuple(_explained(part, properties) for part in term.parts if not part.is_literal and part.number is None)
    if term.is_property:
        value = term.value(properties)
        return Part(term.text, value is not None, None if value is None else str(value), is_property=True)
    try:
        found = term.value(properties) if term.condition is None else term.condition(properties)
    except ValueError as error:
        return Part(term.text, None, error=str(error), parts=parts)
    return Part(term.text, found if isinstance(found, bool) else None, parts=parts)


def _condition(term: _Term) -> Condition:
    if term.condition is None:
        raise ExpressionRejected(f"Expression will not result in a boolean value: {term.text}")
    return term.condition


def _conditional(text: str, condition: Condition, *parts: _Term) -> _Term:
    depth = 1 + max(part.depth for part in parts)
    if depth > DEPTH_MAX:
        raise ExpressionRejected(f"the expression is nested deeper than {DEPTH_MAX}")
    return _Term(text, condition, condition, depth=depth, parts=parts)


class _Terms:
    """The functions that compile the rules of the grammar. Lark calls the function with the name of a rule."""

    def variable(self, parts: list[Any]) -> _Term:
        name = parts[0].encode()

        def find(properties: bytes) -> str | None:
            found = find_property(properties, name)
            return None if found is None else found.decode("utf-8", "replace")

        def condition(properties: bytes) -> bool | None:  # never True: no property has Java's type Boolean
            return None if find_property(properties, name) is None else False

        return _Term(str(parts[0]), find, condition, is_property=True, is_orderable=True)

    def text(self, parts: list[Any]) -> _Term:
        return _Term(str(parts[0]), _always(_unquoted(parts[0])), is_literal=True)

    def constant(self, parts: list[Any]) -> _Term:
        name = parts[0].upper()
        always = _always(_CONSTANTS[name])
        return _Term(name, always, always, is_literal=True)

    def decimal(self, parts: list[Any]) -> _Term:
        value = int(parts[0].rstrip("lL")) if len(parts[0]) < 25 else _I64_END
        if value >= _I64_END:
            raise ExpressionRejected(f'For input string: "{parts[0]}"')
        parse = parse_int if value < _I32_END else parse_long
        return _numeric(str(value), _Number(value, parse, value), is_literal=True)

    def float(self, parts: list[Any]) -> _Term:
        value = float(parts[0])
        # The reference refuses numbers below Double.MIN_VALUE, the smallest positive double, and therefore 0.0.
        if value == 0.0:
            raise ExpressionRejected(f"{parts[0]} is less than 4.9E-324")
        if value == float("inf"):
            raise ExpressionRejected(f"{parts[0]} is greater than 1.7976931348623157E308")
        return _numeric(str(value), _Number(value, parse_double, sortable(value)), is_literal=True)

    def minus(self, parts: list[Any]) -> _Term:
        term: _Term = parts[1]
        text = f"(- {term.text})"
        if term.number is not None:
            value, parse = -term.number.value, term.number.parse
            key = sortable(value) if isinstance(value, float) else value
            return _numeric(text, _Number(value, parse, key), is_literal=False)
        inner = _conditional(text, _unknown_after(term.value), term)
        inner.condition, inner.is_orderable = None, True
        return inner

    def negation(self, parts: list[Any]) -> _Term:
        return _negation(parts[1])

    def any_of(self, parts: list[Any]) -> _Term:
        return _joined(parts, "||", decisive=True)

    def all_of(self, parts: list[Any]) -> _Term:
        return _joined(parts, "&&", decisive=False)

    def equality(self, parts: list[Any]) -> _Term:
        left, sign, right = parts
        if "NULL" in (left.text, right.text):
            raise ExpressionRejected("'NULL' cannot be compared.")
        if left.text in _CONSTANTS and right.is_literal and right.text not in _CONSTANTS:
            raise ExpressionRejected(f"'{left.text}' cannot be compared with '{right.text}'")
        equal = _conditional(f"({left.text} == {right.text})", _equality(left, right), left, right)
        return equal if sign == "=" else _negation(equal)

    def is_null(self, parts: list[Any]) -> _Term:
        term: _Term = parts[0]
        value, wanted = term.value, len(parts) == 2
        text = f"({term.text} IS {'' if wanted else 'NOT '}NULL)"
        return _conditional(text, lambda properties: (value(properties) is None) is wanted, term)

    def order(self, parts: list[Any]) -> _Term:
        return _order(parts[0], str(parts[1]), parts[2])

    def between(self, parts: list[Any]) -> _Term:
        term, inverted, low, high = parts
        if inverted:
            below, above = _order(term, "<", low), _order(term, ">", high)
            return _joined([below, above], "||", decisive=True)
        if low.is_literal and high.is_literal:
            _check_bounds(low, high)
        return _joined([_order(term, ">=", low), _order(term, "<=", high)], "&&", decisive=False)

    def one_of(self, parts: list[Any]) -> _Term:
        term, inverted, *listed = parts
        if not term.is_property:
            raise ExpressionRejected(f"Expected a property for In expression, got: {term.text}")
        find, texts, wanted = term.value, frozenset(_unquoted(one) for one in listed), not inverted

        def condition(properties: bytes) -> bool | None:
            value = find(properties)
            return None if value is None else (value in texts) is wanted

        return _conditional(f"({term.text} {'' if wanted else 'NOT '}IN (...))", condition, term)

    def text_test(self, parts: list[Any]) -> _Term:
        """Return the term of a text test, with or without NOT. In both forms the result is False if the property is
        missing or not a text, or if the text to find is empty."""
        term, inverted, name, quoted = parts
        find, test, sought, wanted = term.value, _TEXT_TESTS[name.upper()], _unquoted(quoted), not inverted

        def condition(properties: bytes) -> bool | None:
            if not sought:
                return False
            value = find(properties)
            return isinstance(value, str) and test(value, sought) is wanted

        return _conditional(f"({'' if wanted else 'NOT '}{name.upper()} {term.text})", condition, term)


# ---- from terms to functions


def _unquoted(token: str) -> str:
    return token[1:-1].replace("''", "'")


def _always(value: T) -> Callable[[bytes], T]:
    return lambda properties: value


def _unknown_after(value: Callable[[bytes], Value]) -> Condition:
    def unknown(properties: bytes) -> None:
        value(properties)  # raises ValueError if a value cannot be parsed

    return unknown


def _numeric(text: str, number: _Number, *, is_literal: bool) -> _Term:
    return _Term(text, _always(number.value), number=number, is_orderable=True, is_literal=is_literal)


def _negation(term: _Term) -> _Term:
    inner = _condition(term)

    def condition(properties: bytes) -> bool | None:
        value = inner(properties)
        return None if value is None else not value

    return _conditional(f"(NOT {term.text})", condition, term)


def _joined(parts: list[_Term], sign: str, *, decisive: bool) -> _Term:
    """Return the term of ``OR`` or ``AND``. The first part with the decisive result decides. Without a decisive part,
    one unknown part makes the result unknown."""
    conditions, otherwise = tuple(_condition(part) for part in parts), not decisive

    def condition(properties: bytes) -> bool | None:
        verdict: bool | None = otherwise
        for one in conditions:
            value = one(properties)
            if value is decisive:
                return value
            if value is None:
                verdict = None
        return verdict

    return _conditional(f"({f' {sign} '.join(part.text for part in parts)})", condition, *parts)


def _order(left: _Term, sign: str, right: _Term) -> _Term:
    for term in (left, right):
        if not term.is_orderable:
            raise ExpressionRejected(f"Value '{term.text}' cannot be compared.")
    if left.number is not None and right.number is not None:
        condition: Condition = _always(_ORDERS[sign](*_common_keys(left.number, right.number)))
    elif right.number is not None:
        condition = _order_to_number(left.value, _ORDERS[sign], right.number)
    elif left.number is not None:
        condition = _order_to_number(right.value, _ORDERS[_TURNED[sign]], left.number)
    else:
        condition = _order_of_texts(left.value, _ORDERS[sign], right.value)
    return _conditional(f"({left.text} {sign} {right.text})", condition, left, right)


def _order_to_number(find: Callable[[bytes], Value], order: Order, number: _Number) -> Condition:
    parse, key = number.parse, number.key

    def condition(properties: bytes) -> bool | None:
        value = find(properties)
        return order(parse(value), key) if isinstance(value, str) else None

    return condition


def _order_of_texts(
    find_left: Callable[[bytes], Value], order: Order, find_right: Callable[[bytes], Value]
) -> Condition:
    def condition(properties: bytes) -> bool | None:
        left, right = find_left(properties), find_right(properties)
        if isinstance(left, str) and isinstance(right, str):
            return order(parse_double(left), parse_double(right))
        return None

    return condition


def _common_keys(left: _Number, right: _Number) -> tuple[int, int]:
    if left.parse is parse_double or right.parse is parse_double:
        return sortable(float(left.value)), sortable(float(right.value))
    return left.key, right.key


def _check_bounds(low: _Term, high: _Term) -> None:
    """Check the bounds of BETWEEN, if both are constants. Raises ExpressionRejected: the bounds are not valid."""
    if "NULL" in (low.text, high.text):
        raise ExpressionRejected("Illegal values of between, values can not be null!")
    if low.number is None or high.number is None:
        return
    low_key, high_key = _common_keys(low.number, high.number)
    if low_key > high_key:
        raise ExpressionRejected(
            f"Illegal values of between, left value({low.text}) must less than or equal to right value({high.text})"
        )


def _equality(left: _Term, right: _Term) -> Condition:
    if left.number is not None and right.number is not None:
        low, high = _common_keys(left.number, right.number)
        return _always(low == high)
    if right.number is not None:
        return _equality_to_number(left.value, right.number, missing=None)
    if left.number is not None:
        return _equality_to_number(right.value, left.number, missing=False)
    left_value, right_value = left.value, right.value
    return lambda properties: _equal(left_value(properties), right_value(properties))


def _equality_to_number(find: Callable[[bytes], Value], number: _Number, *, missing: bool | None) -> Condition:
    parse, key = number.parse, number.key

    def condition(properties: bytes) -> bool | None:
        value = find(properties)
        if isinstance(value, str):
            return parse(value) == key
        return missing if value is None else False

    return condition


def _equal(left: Value, right: Value) -> bool | None:
    """Return the result of ``=`` between texts and truth values. Only a text on the left is parsed as a truth value.
    Raises ValueError: a truth value on the left is compared with a text."""
    if left is None:
        return True if right is None else None
    if right is None:
        return False
    if isinstance(left, str) and isinstance(right, bool):
        return (left.lower() == "true") is right
    if isinstance(left, bool) and isinstance(right, str):
        raise ValueError(f"a truth value is compared with the text {right!r}")
    return left == right


# ---- bitmaps (``BloomFilter``)


@dataclass(frozen=True, slots=True)
class BloomFilter:
    """The Bloom filter of subscriptions. A bitmap for each message marks the groups whose expressions may be true.
    ``position_count`` is k, ``bit_count`` is m, a multiple of 8.

    A subscription ``group#topic`` has k of the m bits. The dispatcher sets the bits of every group whose expression is
    true for a message. A pull skips messages that lack one of the group's bits.

    The positions are part of the file format. The hash is Murmur3 x64 128 of the UTF-8 text, with seed 0. Its low 64
    bits are two i32, the lower ``h1`` and the upper ``h2``. The i-th position, from i = 1, is ``h1 + i * h2`` in
    wrapping 32-bit arithmetic, inverted when negative, modulo m. Bit p is ``1 << (p % 8)`` of byte ``p / 8``.
    Source: store.md §17.3."""

    position_count: int
    bit_count: int

    @classmethod
    def of(cls, error_percent: int, expected_count: int) -> BloomFilter:
        """Return the filter for an error rate in percent and a number of groups: 20 and 32 give k = 3 and m = 112."""
        bits = math.ceil(expected_count * math.log2(100 / error_percent) * math.log2(math.e))
        return cls(math.ceil(math.log(error_percent / 100, 0.5)), -(-bits // 8) * 8)

    def positions(self, group: str, topic: str) -> tuple[int, ...]:
        """Return the positions of the bits of a subscription."""
        # Use the unsigned hash to split the bits into two halves, like Java's casts to int.
        low64 = mmh3.hash64(f"{group}#{topic}".encode(), 0, x64arch=True, signed=False)[0]
        h1, h2 = low64 & 0xFFFFFFFF, low64 >> 32
        sums = ((h1 + i * h2) & 0xFFFFFFFF for i in range(1, self.position_count + 1))
        positions = tuple((one ^ 0xFFFFFFFF if one >> 31 else one) % self.bit_count for one in sums)
        assert len(positions) == self.position_count, "there are k positions, some may be equal"
        return positions

    def mask(self, positions: tuple[int, ...]) -> int:
        """Return a number with the bits at some positions set. Masks can be combined with ``|``."""
        return sum({1 << position for position in positions})

    def bitmap(self, mask: int) -> bytes:
        """Return the bytes of a mask, as stored for a message."""
        assert self.bit_count % 8 == 0, "the number of bits is a multiple of 8"
        return mask.to_bytes(self.bit_count // 8, "little")

    def has(self, bitmap: bytes, mask: int) -> bool:
        """Return True if a bitmap has all bits of a mask. Return True also if the length of the bitmap differs, because
        it cannot be compared."""
        return len(bitmap) * 8 != self.bit_count or int.from_bytes(bitmap, "little") & mask == mask
