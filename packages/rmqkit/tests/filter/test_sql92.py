"""SQL92 expressions (behaviour.md §6.3–§6.5)."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.filter.sql92 import DEPTH_MAX, EXPRESSION_CHARACTERS_MAX, ExpressionRejected, compile_expression
from rmqkit.protocol.properties import encode_properties
from tests.examples import examples
from tests.sources import is_installed

ERROR, REJECTED = "error", "rejected"


def outcome(text, **properties):
    """Return the verdict of an expression on a message: True, False, None, REJECTED or ERROR."""
    encoded = encode_properties(properties)
    try:
        expression = compile_expression(text)
    except ExpressionRejected:
        return REJECTED
    try:
        verdict = expression.evaluate(encoded)
    except ValueError:
        verdict = ERROR
    assert expression.matches(encoded) is (verdict is True)
    part = expression.explain(encoded)
    if not part.is_property:
        assert (ERROR if part.error else part.verdict) == verdict
    return verdict


def test_each_part_of_an_expression_is_explained():
    expression = compile_expression("a > 5 AND (b IS NULL OR c IN ('x', 'y')) AND NOT (d > 1)")
    whole = expression.explain(encode_properties({"a": "7", "b": "1", "c": "z", "d": "cheap"}))
    assert [(one.text, one.verdict, bool(one.error)) for one in whole.parts] == [
        ("(a > 5)", True, False),
        ("((b IS NULL) || (c IN (...)))", False, False),
        ("(NOT (d > 1))", None, True),
    ]
    (a,) = whole.parts[0].parts
    assert (a.text, a.value, a.is_property) == ("a", "7", True)
    assert whole.verdict is False
    missing = expression.explain(b"").parts[0]
    assert (missing.verdict, missing.parts[0].value) == (None, None)


WORKED_EXAMPLES = [
    ("a > 5", {"a": "7"}, True),
    ("a > 5", {"a": "7.5"}, ERROR),
    ("a > 5.0", {"a": "7.5"}, True),
    ("a > 5.0", {"a": "7"}, True),
    ("a > 5", {}, None),
    ("a > 5", {"a": "abc"}, ERROR),
    ("a = 5", {"a": "5.0"}, ERROR),
    ("a = 3.0", {"a": "3"}, True),
    ("a = '5'", {"a": "5"}, True),
    ("5 = a", {"a": "5"}, True),
    ("a <> 'abc'", {"a": "xyz"}, True),
    ("a <> 'abc'", {}, None),
    ("NOT (a = 'abc')", {}, None),
    ("a IS NULL", {}, True),
    ("a IS NOT NULL", {"a": "x"}, True),
    ("a IN ('x','y')", {"a": "z"}, False),
    ("a NOT IN ('x','y')", {"a": "z"}, True),
    ("a NOT IN ('x','y')", {}, None),
    ("a IN (1,2)", {"a": "1"}, REJECTED),
    ("a BETWEEN 3 AND 10", {"a": "3"}, True),
    ("a NOT BETWEEN 3 AND 10", {"a": "11"}, True),
    ("a BETWEEN 10 AND 3", {"a": "5"}, REJECTED),
    ("a BETWEEN 'x' AND 'y'", {"a": "x"}, REJECTED),
    ("a between b and c", {"a": "5", "b": "1", "c": "9"}, True),
    ("a > b", {"a": "10", "b": "9"}, True),
    ("a > b", {"a": "x", "b": "y"}, ERROR),
    ("a > 'x'", {"a": "y"}, REJECTED),
    ("a = b", {"a": "10", "b": "10.0"}, False),
    ("a = TRUE", {"a": "true"}, True),
    ("a = TRUE", {"a": "yes"}, False),
    ("a = false", {"a": "xyz"}, True),
    ("a", {"a": "true"}, False),
    ("NOT a", {"a": "true"}, True),
    ("a OR b = 1", {"b": "1"}, True),
    ("a AND b = 1", {"b": "1"}, None),
    ("a AND b = 1", {"b": "2"}, False),
    ("a > 5 OR b = 'x' AND c = 'y'", {"a": "1", "b": "x", "c": "z"}, False),
    ("(a > 5 OR b = 'x') AND c = 'y'", {"a": "6", "c": "y"}, True),
    ("a = 'it''s'", {"a": "it's"}, True),
    ("a CONTAINS 'bc'", {"a": "abcd"}, True),
    ("a NOT CONTAINS 'bc'", {}, False),
    ("a CONTAINS ''", {"a": "x"}, False),
    ("a STARTSWITH 'ab'", {"a": "abc"}, True),
    ("a CONTAINS b", {"a": "x", "b": "x"}, REJECTED),
    ("a > -5", {"a": "-3"}, True),
    ("-a > 5", {"a": "-6"}, None),
    ("a > 100L", {"a": "101"}, True),
    ("a > 99999999999", {"a": "100000000000"}, True),
    ("a > 0.0", {"a": "1"}, REJECTED),
    ("a > 1.0E3", {"a": "1001"}, True),
    ("TAGS is not null and TAGS in ('TagA','TagB')", {"TAGS": "TagB"}, True),
    ("A = 'x'", {"a": "x"}, None),
    ("a = NULL", {"a": "x"}, REJECTED),
    ("a != 5", {"a": "5"}, REJECTED),
    ("a == 5", {"a": "5"}, REJECTED),
    ("a IS NULL OR a = 'abc'", {"a": "abc"}, True),
    ("TRUE", {}, True),
    ("1 = 1", {}, True),
    ("NULL", {}, None),
    ("5", {}, REJECTED),
    ("'abc'", {}, REJECTED),
    ("", {}, REJECTED),
    ("a > 5 > 3", {"a": "7"}, REJECTED),
    ("a = 'x' AND (b IS NULL OR b > 3)", {"a": "x"}, True),
]

ODDITIES = [
    # the parser stops at the first token it cannot use
    ("a > 5)", {"a": "7"}, True),
    ("a LIKE 'x%'", {"a": "x"}, False),
    ("a + 1 > 2", {"a": "7"}, False),
    ("a > 0x10", {"a": "7"}, True),
    ("a = 010", {"a": "0"}, True),
    ("a = 5 7", {"a": "5"}, True),
    ("a=7ANDb=9", {"a": "7", "b": "0"}, True),
    ("a = 5 -- AND b = 8", {"a": "5"}, True),
    ("a ) !", {"a": "5"}, False),
    # but what it has begun it wants to end
    ("a OR )", {"a": "7"}, REJECTED),
    ("a NOT 5", {"a": "7"}, REJECTED),
    ("a IS 5", {"a": "7"}, REJECTED),
    ("(a > 5", {"a": "7"}, REJECTED),
    ("a > 5 #", {"a": "7"}, REJECTED),
    # words
    ("notx = 'y'", {"notx": "y"}, True),
    ("containsx = 'y'", {"containsx": "y"}, True),
    ("$a_1 = 'y'", {"$a_1": "y"}, True),
    ("a nOt iN ('7')", {"a": "7"}, False),
    ("\u212a = 1", {"\u212a": "1"}, REJECTED),  # the Kelvin sign is no letter k
    ("a = 'é'", {"a": "é"}, True),
    # comments
    ("-- all\na = 5 /* * / */ AND b = 8", {"a": "5", "b": "8"}, True),
    ("a = 5 /* AND b = 8", {"a": "5"}, REJECTED),
    # two kinds of value
    ("TRUE = a", {"a": "true"}, ERROR),
    ("(a = 7) = b", {"a": "7", "b": "true"}, ERROR),
    ("a = (b = 7)", {"a": "true", "b": "7"}, True),
    ("1 = TRUE", {}, False),
    ("TRUE = 1", {}, REJECTED),
    ("'x' = 1", {}, ERROR),
    ("1 = 1.0", {}, True),
    ("9007199254740993 = 9007199254740992.0", {}, True),
    # what is missing
    ("7 = zz", {}, False),
    ("zz = 7", {}, None),
    ("zz = zy", {}, True),
    ("zz <> zy", {}, False),
    # numbers as their Java type
    ("a > 5", {"a": "9999999999"}, ERROR),
    ("a > -2147483648", {"a": "9999999999"}, True),
    ("a > 9223372036854775808", {"a": "1"}, REJECTED),
    ("a > 1.7976931348623159e308", {"a": "1"}, REJECTED),
    ("a > 7.5", {"a": "NaN"}, True),
    ("a > b", {"a": "0.0", "b": "-0.0"}, True),
    # signs
    ("a > --5", {"a": "6"}, True),
    ("a > +5", {"a": "6"}, True),
    ("+a", {"a": "true"}, False),
    ("-TRUE", {}, REJECTED),
    ("-(a > 5) = b", {"a": "x"}, ERROR),
    ("a BETWEEN -3 AND -9", {"a": "5"}, False),  # a signed number is no constant
    ("a NOT BETWEEN 9 AND 1", {"a": "5"}, True),
    # text tests
    ("NOT a CONTAINS '5'", {"a": "5"}, False),  # (NOT a) CONTAINS '5'
    ("(b > 1) CONTAINS ''", {"b": "x"}, False),  # not even evaluated
    ("5 CONTAINS '5'", {}, False),
    ("'abc' CONTAINS 'b'", {}, True),
    # logic stops early, errors do not wait
    ("a > 5 OR s > 5", {"a": "7", "s": "x"}, True),
    ("s > 5 OR a > 5", {"a": "7", "s": "x"}, ERROR),
    ("(a) IN ('7')", {"a": "7"}, True),
    ("'7' IN ('7')", {}, REJECTED),
]


@pytest.mark.parametrize(("text", "properties", "verdict"), WORKED_EXAMPLES + ODDITIES)
def test_expressions_answer_as_the_reference_does(text, properties, verdict):
    assert outcome(text, **properties) == verdict


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a > 'x'", "Value ''x'' cannot be compared."),
        ("a > NULL", "Value 'NULL' cannot be compared."),
        ("a = NULL", "'NULL' cannot be compared."),
        ("TRUE = 7", "'TRUE' cannot be compared with '7'"),
        ("a > 5 > 3", "Value '(a > 5)' cannot be compared."),
        ("(a = 3) > 3", "Value '(a == 3)' cannot be compared."),
        ("a BETWEEN 10 AND 3", "Illegal values of between, left value(10) must less than or equal to right value(3)"),
        ("a BETWEEN NULL AND 3", "Illegal values of between, values can not be null!"),
        ("5 IN ('x')", "Expected a property for In expression, got: 5"),
        ("NOT 5", "Expression will not result in a boolean value: 5"),
        ("a > 0.0", "0.0 is less than 4.9E-324"),
        ("a > 1e400", "1e400 is greater than 1.7976931348623157E308"),
        ("a > 99999999999999999999", 'For input string: "99999999999999999999"'),
        ("a OR )", 'Encountered ")" at line 1, column 6. Was expecting one of: DECIMAL, FALSE, FLOAT, LPAR, MINUS, '),
        ("a OR\n b IN (", 'Encountered "<EOF>" at line 2, column 7. Was expecting one of: STRING'),
        ("", 'Encountered "<EOF>" at line '),
        ("a !", 'Lexical error at line 1, column 3.  Encountered: "!" (33)'),
    ],
)
def test_a_rejection_says_why(text, reason):
    with pytest.raises(ExpressionRejected) as rejected:
        compile_expression(text)
    assert str(rejected.value).startswith(reason)


def test_only_the_properties_named_are_looked_up():
    broken = b"\xff\x01\xff\x02a\x017\x02\x01\x01"
    assert compile_expression("a > 5").matches(broken)


@pytest.mark.parametrize(
    "text",
    [
        "a = 1" * EXPRESSION_CHARACTERS_MAX,
        "(" * 1000 + "a = 1" + ")" * 1000,
        "- " * 1000 + "5 < a",
        "NOT " * (DEPTH_MAX + 1) + "a",
        "a" + " = 'x'" * (DEPTH_MAX + 1),
    ],
)
def test_length_and_depth_are_bounded(text):
    with pytest.raises(ExpressionRejected, match=r"characters|deep"):
        compile_expression(text)


def test_what_is_long_and_not_deep_is_taken():
    wide = "a = 'y' OR " * 1000 + "a = 'x'"
    assert outcome(wide, a="x") is True
    assert outcome("NOT " * (DEPTH_MAX - 2) + "(a = 'x')", a="x") is True


# ---- against a plain evaluator of the same tree

PROPERTIES = st.dictionaries(
    st.sampled_from("abc"), st.sampled_from(["1", "7", "7.5", "-3", "x", "true", "it's", "9999999999"]), max_size=3
)
NUMBERS = st.sampled_from([("7", 7), ("-3", -3), ("7.5", 7.5), ("1.0", 1.0), ("99999999999", 99999999999)])
NAMES = st.sampled_from("abcd")


def _read(text, number):
    """A property as a number literal's type; the values above keep Python's and Java's readings alike."""
    if isinstance(number, float):
        return float(text)
    value = int(text)
    if -(1 << 31) <= number < 1 << 31 and not -(1 << 31) <= value < 1 << 31:
        raise ValueError(text)
    return value


def _logic(kind, values):
    verdict = kind == "AND"
    for value in values:
        found = value()
        if found is None:
            verdict = None
        elif found is not (kind == "AND"):
            return found
    return verdict


@st.composite
def trees(draw, depth=3):
    """An expression, and a function that works it out the slow way from a dict."""
    kind = draw(st.sampled_from(["order", "equal", "in", "null", "text"] + (["AND", "OR", "NOT"] if depth else [])))
    if kind in ("AND", "OR"):
        parts = draw(st.lists(trees(depth=depth - 1), min_size=2, max_size=3))
        text = "(" + f" {kind} ".join(part[0] for part in parts) + ")"
        return text, lambda p: _logic(kind, [lambda f=part[1]: f(p) for part in parts])
    if kind == "NOT":
        text, inner = draw(trees(depth=depth - 1))
        return f"NOT ({text})", lambda p: None if (found := inner(p)) is None else not found
    name = draw(NAMES)
    if kind == "order":
        sign, (text, number) = draw(st.sampled_from([">", ">=", "<", "<="])), draw(NUMBERS)
        compare = {
            ">": lambda x: x > number,
            ">=": lambda x: x >= number,
            "<": lambda x: x < number,
            "<=": lambda x: x <= number,
        }[sign]
        return f"{name} {sign} {text}", lambda p: compare(_read(p[name], number)) if name in p else None
    if kind == "equal":
        value = draw(st.sampled_from(["1", "x", "it's"]))
        quoted = value.replace("'", "''")
        return f"{name} = '{quoted}'", lambda p: p[name] == value if name in p else None
    if kind == "in":
        return f"{name} IN ('x','7')", lambda p: p[name] in ("x", "7") if name in p else None
    if kind == "null":
        return f"{name} IS NULL", lambda p: name not in p
    return f"{name} NOT STARTSWITH '7'", lambda p: name in p and not p[name].startswith("7")


@given(trees(), PROPERTIES)
@examples(150)
def test_compiled_expressions_agree_with_a_slow_evaluator(tree, properties):
    text, slow = tree
    try:
        expected = slow(properties)
    except ValueError:
        expected = ERROR
    assert outcome(text, **properties) == expected


TOKENS = st.sampled_from(
    "a b 5 5.5 'x' ( ) , = <> > >= < <= + - NOT AND OR IS NULL IN BETWEEN CONTAINS TRUE ! -- /* */ ' \n".split(" ")
)


@given(st.one_of(st.text(), st.lists(TOKENS).map(" ".join)), st.binary())
@examples(200)
def test_any_text_gives_a_verdict_or_the_one_documented_error(text, properties):
    try:
        expression = compile_expression(text)
    except ExpressionRejected:
        return
    assert expression.matches(properties) in (True, False)


@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("rmqkit-server", "rmqkit.broker.server"),
        ("rmqkit", "rmqkit.client.consumer.push"),
        ("rmqkit-spark", "rmqkit.arrow.reader"),
    ],
)
def test_the_parser_is_not_loaded_before_there_is_an_expression(package, module):
    """It takes a third of what starting a broker's or a client's process takes."""
    if not is_installed(package):
        pytest.skip(f"{package} is not installed: pip install -e packages/{package}")
    code = f"import sys, {module}; sys.exit('lark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
