"""The formats that are enforced, as patterns: each admits no string that the format does not.

Some admit fewer: ``uri`` has no IPv6 host, ``iri`` and the ``idn-`` formats hold ASCII only,
``time`` has no leap second, a host's label no two hyphens in a row, and ``regex`` no lookaround
and groups of two levels at most.
"""

from __future__ import annotations

__all__ = ["FORMATS"]

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
_NAME_CHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=-]|{_ESCAPED})"
_PATH_CHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_ESCAPED})"
_FIRST_CHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{_ESCAPED})"  # of a reference: no colon
_AUTHORITY = f"//(?:(?:{_NAME_CHAR}|:)*@)?{_NAME_CHAR}*(?::[0-9]{{0,5}})?(?:/{_PATH_CHAR}*)*"
_ABSOLUTE = f"/(?:{_PATH_CHAR}+(?:/{_PATH_CHAR}*)*)?"
_TAIL = rf"(?:\?(?:{_PATH_CHAR}|[/?])*)?(?:#(?:{_PATH_CHAR}|[/?])*)?"
_ROOTLESS = f"{_PATH_CHAR}+(?:/{_PATH_CHAR}*)*"
_URI = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|{_ABSOLUTE}|{_ROOTLESS})?{_TAIL}"
_RELATIVE = f"(?:{_AUTHORITY}|{_ABSOLUTE}|{_FIRST_CHAR}+(?:/{_PATH_CHAR}*)*)?{_TAIL}"
_REFERENCE = f"(?:{_URI})|{_RELATIVE}"

_VARIABLE = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?:\*|:[1-9][0-9]{0,3})?"
_TEMPLATE = (
    rf"(?:[A-Za-z0-9._~!$&()*+,;=:@/?#-]|{_ESCAPED}"
    rf"|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)
_POINTER = "(?:/(?:[^~/]|~[01])*)*"

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
        "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})",
        "regex": _REGEX,
    }.items()
}
"""Every format that is enforced, with a pattern for the whole string."""
