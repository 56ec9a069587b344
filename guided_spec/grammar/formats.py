"""Formats of JSON strings, each as a pattern for the whole string."""

from __future__ import annotations

import re

from guided_spec.grammar.regex import fits_length

_BOUNDS = (16, 8, 4, 2, 1, 0)
_REPEAT = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]|\(\?:"
    r"|(?P<many>[*+?]|\{(?P<low>\d+)(?P<comma>,)?(?P<high>\d*)\})"
)

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # two digits, a multiple of 4 but not 00
_CENTURY = "(?:0[48]|[2468][048]|[13579][26])00"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_FOURTH}|{_CENTURY})-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"

_N = "[0-9]{1,9}"
_OF_DAY = f"(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_OF_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_DURATION = f"P(?:{_N}W|{_OF_DAYS}(?:T{_OF_DAY})?|T{_OF_DAY})"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [f"(?:{_H}:){{7}}{_H}", f"(?:{_H}:){{1,7}}:", f":(?::{_H}){{1,7}}", "::"]
    + [f"(?:{_H}:){{1,{7 - n}}}(?::{_H}){{1,{n}}}" for n in range(1, 7)]
    + [f"::(?:[Ff]{{4}}:)?{_IPV4}", f"(?:{_H}:){{6}}{_IPV4}"]
)
_HOSTNAME = "|".join(
    rf"{label}(?:\.{label}){{0,{more}}}"
    for label, more in (
        ("[A-Za-z0-9](?:-?[A-Za-z0-9]){0,30}", 3),
        ("[A-Za-z0-9](?:-?[A-Za-z0-9]){0,12}", 8),
    )
)
_ATOM = "[A-Za-z0-9!#%&'*+/=?^_`{|}~-]{1,20}"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@(?:{_HOSTNAME})"

_ESCAPED = "%[0-9A-Fa-f]{2}"
_NAME = "A-Za-z0-9._~!$&'()*+,;="
_NAME_CHAR = rf"(?:[{_NAME}-]|{_ESCAPED})"
_PATH_CHAR = rf"(?:[{_NAME}:@-]|{_ESCAPED})"
_FIRST_CHAR = rf"(?:[{_NAME}@-]|{_ESCAPED})"  # of a reference: no colon
# Segments and slashes as one loop, not one in the other: xgrammar compiles that far sooner.
_PATH = rf"(?:[{_NAME}:@/-]|{_ESCAPED})*"
_QUERY = rf"(?:[{_NAME}:@/?-]|{_ESCAPED})*"
_AUTHORITY = rf"//(?:(?:[{_NAME}:-]|{_ESCAPED})*@)?{_NAME_CHAR}*(?::[0-9]{{0,5}})?(?:/{_PATH})?"
_ROOTLESS = f"{_PATH_CHAR}{_PATH}"
_ABSOLUTE = f"/(?:{_ROOTLESS})?"
_TAIL = rf"(?:\?{_QUERY})?(?:#{_QUERY})?"
_URI = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|{_ABSOLUTE}|{_ROOTLESS})?{_TAIL}"
_RELATIVE = f"(?:{_AUTHORITY}|{_ABSOLUTE}|{_FIRST_CHAR}+(?:/{_PATH})?)?{_TAIL}"
_REFERENCE = f"(?:{_URI})|{_RELATIVE}"

_VARIABLE = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?:\*|:[1-9][0-9]{0,3})?"
_TEMPLATE = (
    rf"(?:[A-Za-z0-9._~!$&()*+,;=:@/?#-]|{_ESCAPED}"
    rf"|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)
_POINTER = "(?:/(?:[^~]|~[01])*)?"

_ONE = (
    r"(?:[A-Za-z0-9 _,:;<>=!@#%&~/'\"-]|\\[dDwWsSnrt.*+?()|\[\]{}^$/\\-]|\."
    r"|\[\^?(?:a-z|A-Z|0-9|[a-zA-Z0-9_ .,:/]|\\[dws.-])+\])"
    r"(?:[*+?]|\{[0-9](?:,[1-9][0-9])?\})?"
)
_GROUP = rf"\((?:\?:)?(?:{_ONE}|\|)*\)(?:[*+?])?"
_GROUPS = rf"\((?:\?:)?(?:{_ONE}|\||{_GROUP})*\)(?:[*+?])?"
_REGEX = rf"\^?(?:{_ONE}|\||{_GROUPS})*\$?"

FORMATS: dict[str, str] = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "duration": _DURATION,
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "hostname": _HOSTNAME,
        "idn-hostname": _HOSTNAME.replace("A-Z", ""),
        "email": _EMAIL,
        "idn-email": _EMAIL,
        "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
        "uri": _URI,
        "iri": _URI,
        "uri-reference": _REFERENCE,
        "iri-reference": _REFERENCE,
        "uri-template": _TEMPLATE,
        "json-pointer": _POINTER,
        # jsonschema 4.26 takes any digit after a 0 for one after a leading 0.
        "relative-json-pointer": f"(?:0|[1-9]{{1,8}}0?)(?:#|{_POINTER})",
        "regex": _REGEX,
    }.items()
}
"""Every format that is enforced, with a pattern for the whole string."""


def format_within(name: str, low: int, high: int | None) -> str | None:
    """A pattern for strings of a known format, of ``low`` to ``high`` characters.

    Where lengths bind, repeats are cut down until no string is too long, so that some strings of
    the format are left out. None where that does not help.
    """
    pattern = FORMATS[name]
    for written in (pattern, *(_with_fewer(pattern, most) for most in _BOUNDS)):
        if fits_length(written, low, high):
            return written
    return None


def _with_fewer(pattern: str, most: int) -> str:
    """The pattern with no more than ``most`` repeats where it needs fewer."""

    def bound(found: re.Match[str]) -> str:
        many, low, comma = found["many"], found["low"], found["comma"]
        if many is None or (low is not None and comma is None):
            return found[0]
        least = int(low or many == "+")
        upper = 1 if many == "?" else int(found["high"] or most)
        return f"{{{least},{max(least, min(upper, most))}}}"

    return _REPEAT.sub(bound, pattern)
