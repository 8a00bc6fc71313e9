"""Formats as patterns, if llguidance has none or one that is too wide. Each pattern matches only valid texts."""

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_OF_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|{_YEAR}-(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|{_YEAR}-02-(?:0[1-9]|1[0-9]|2[0-8])|(?:[0-9]{{2}}{_OF_FOUR}|{_OF_FOUR}00)-02-29)"
)
_FRACTION = r"(?:\.[0-9]+)?"
_TIME = (
    f"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    f"|23:59:60{_FRACTION}(?:[zZ]|[+-]00:00))"
)
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_SCHEME = "[a-zA-Z][a-zA-Z0-9+.-]*:"


_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"


def _ipv6() -> str:
    """Return a pattern of RFC 4291, section 2.2: eight groups, or fewer around one `::`.

    The last two groups may be an IPv4 address.
    """
    group, last = "[0-9a-fA-F]{1,4}", f"(?:[0-9a-fA-F]{{1,4}}:[0-9a-fA-F]{{1,4}}|{_IPV4})"
    options = [f"(?:{group}:){{6}}{last}"]
    for num_before in range(8):
        before = f"{group}(?::{group}){{{num_before - 1}}}" if num_before else ""
        after = [f"{group}(?::{group}){{0,{6 - num_before}}}"] if num_before < 7 else []
        with_ipv4 = [f"(?:{group}:){{0,{5 - num_before}}}{_IPV4}"] if num_before < 6 else []
        options.append(f"{before}::(?:{'|'.join([*after, *with_ipv4])})?")
    return f"(?:{'|'.join(options)})"


_IPV6 = _ipv6()
_MORE = "\xa0-\ud7ff\U00010000-\U0001fffd"  # of RFC 3987


def _reference(more: str, *, is_relative: bool = True) -> str:
    """Return a pattern of RFC 3986, section 4.1, or 4.3 with a fragment if not `is_relative`.

    `more` are the characters that RFC 3987 adds.
    """
    other = f"[a-zA-Z0-9._~!$&'()*+,;=@{more}-]|%[0-9a-fA-F]{{2}}"
    character = f"(?:{other}|:)"
    no_at = other.replace("@", "")
    literal = rf"\[(?:{_IPV6}|[vV][0-9a-fA-F]+\.[a-zA-Z0-9._~!$&'()*+,;=:-]+)\]"
    authority = f"//(?:(?:{no_at}|:)*@)?(?:{literal}|(?:{no_at})*)(?::[0-9]*)?(?:/{character}*)*"
    absolute = f"/(?:{character}+(?:/{character}*)*)?"
    rootless = f"{character}+(?:/{character}*)*"
    relative = f"(?:{other})+(?:/{character}*)*"
    rest = rf"(?:\?(?:{character}|[/?])*)?(?:#(?:{character}|[/?])*)?"
    if is_relative:
        return f"(?:(?:{_SCHEME})?{authority}|{_SCHEME}(?:{absolute}|{rootless})?|{absolute}|{relative}|){rest}"
    return f"{_SCHEME}(?:{authority}|{absolute}|{rootless})?{rest}"


_ATOM = (
    r"(?:[a-zA-Z0-9 _@#%&=~,;:<>!/\"'.-]|\\[.dDwWsSnrtfv\\/\[\](){}*+?|^$-]"
    r"|\[\^?(?:a-z|A-Z|0-9|[a-zA-Z0-9_ .,:;/@]|\\[dDwWsS\\\]\[./-])+\])"
)
_RANGES = "|".join(  # of counts in order
    ["[0-9],[1-9][0-9]{1,2}", "[1-9][0-9],[1-9][0-9]{2}", "[1-9][0-9]{0,2},?"]
    + [f"{digit},[{digit}-9]" for digit in range(10)]
    + [f"{digit}[0-9],[{digit + 1}-9][0-9]" for digit in range(1, 9)]
)
_FLAT_REGEX = rf"(?:\^|\$|\||{_ATOM}(?:[*+?]\??|\{{(?:{_RANGES})\}})?)*"
_GROUPS_REGEX = rf"(?:{_FLAT_REGEX}|\((?:\?:)?{_FLAT_REGEX}\)[*+?]?)*"
_REGEX = rf"(?:{_FLAT_REGEX}|\((?:\?:)?{_GROUPS_REGEX}\)[*+?]?)*"

_L = "[a-zA-Z0-9]"
_LABEL = (
    f"{_L}(?:{_L}|[a-zA-Z0-9-]{_L}|[a-zA-Z0-9-](?:{_L}{_L}|-{_L}|(?:{_L}[a-zA-Z0-9-]|-{_L})[a-zA-Z0-9-]{{0,58}}{_L}))?"
)

_U = "[a-z0-9\xdf-\xf6\xf8-\xff\u03b1-\u03c9\u0430-\u044f\u3041-\u3094\u4e00-\u9fa5\uac00-\ud7a3]"
_ANY_LABEL = f"(?:{_LABEL}|{_U}{{1,11}})"  # of letters that RFC 5892 has as valid; 11 are 63 bytes at most as Punycode
_IDN_HOSTNAME = rf"(?:{_ANY_LABEL}(?:[.\u3002\uff0e\uff61]{_ANY_LABEL}){{0,2}}|{_LABEL}(?:\.{_LABEL})*)"
_LOCAL = "(?:[a-zA-Z0-9!#$%&'*+/=?^_`{|}~\xa1-\ud7ff\U00010000-\U0001fffd-])+"

_HEX = "%[0-9a-fA-F]{2}"
_VARIABLE = rf"(?:[A-Za-z0-9_]|{_HEX})(?:\.?(?:[A-Za-z0-9_]|{_HEX}))*(?:\*|:[1-9][0-9]{{0,3}})?"
_TEMPLATE = (  # RFC 6570, section 2
    rf"(?:[!#$&-;=?-\[\]_a-z~{_MORE}]|{_HEX}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)
_CSS = "aqua|black|blue|fuchsia|gray|green|lime|maroon|navy|olive|orange|purple|red|silver|teal|white|yellow"

FORMAT_LENGTHS = {"hostname": 253, "idn-hostname": 253}
FORMAT_PATTERNS = {
    name: f"^(?:{body})$"
    for name, body in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}[tT]{_TIME}",
        "color": rf"#[0-9a-fA-F]{{3}}(?:[0-9a-fA-F]{{3}})?|{_CSS}",
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
        "json-pointer": _POINTER,
        "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
        "uri-reference": _reference(""),
        "iri-reference": _reference(_MORE),
        "iri": _reference(_MORE, is_relative=False),
        "uri-template": _TEMPLATE,
        "idn-hostname": _IDN_HOSTNAME,
        "idn-email": rf"{_LOCAL}(?:\.{_LOCAL})*@{_IDN_HOSTNAME}",
        "regex": _REGEX,
    }.items()
}
OLD_FORMATS = {"ip-address": "ipv4", "host-name": "hostname"}
FORMATS_OF_DRAFT_3 = frozenset({"color"})
_OF_LLGUIDANCE = frozenset({"duration", "email", "uuid", "uri"})
FORMATS = FORMAT_PATTERNS.keys() - FORMATS_OF_DRAFT_3 | _OF_LLGUIDANCE
