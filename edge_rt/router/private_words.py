"""Words that announce secrets, that forbid a text to leave, and that speak of confidential things."""

from __future__ import annotations

import re
from typing import Final

# A stem is searched first, and its words only where it is found.
SECRET_WORDS: Final = {
    "pass": ("password", "passwd", "passphrase", "passwort", "passcode", "mot de passe"),
    "pwd": ("pwd",),
    "secret": ("secret",),
    "token": ("token",),
    "key": (
        "api key", "api_key", "api-key", "apikey", "access key", "access_key", "accesskey", "account key", "accountkey",
        "private key", "private_key", "signing key",
    ),
    "credential": ("credential",),
    "bearer": ("bearer",),
    "authorization": ("authorization",),
    "kennwort": ("kennwort",),
    "contrase": ("contraseña",),
    "пароль": ("пароль",),
    "密": ("密码", "密钥"),
    "口令": ("口令",),
    "令牌": ("令牌",),
}  # fmt: skip

# Of the class "confidential": what people call what they would rather keep. Words only, so it errs both ways.
CONFIDENTIAL: Final = (
    "confidential",
    "proprietary",
    "trade secret",
    "trade secrets",
    "unpublished",
    "nda",
    "internal",
    "employee",
    "employees",
    "customer",
    "customers",
    "patient",
    "patients",
    "medical record",
    "medical records",
    "medical history",
    "passport",
    "social security",
    "driver's license",
    "payroll",
    "salary",
    "compensation",
    "due diligence",
    "board meeting",
    "our crm",
    "our production",
    "our deployment",
    "机密",
    "内部",
    "客户",
    "员工",
    "患者",
    "身份证",
    "专有",
)

_HERE: Final = (
    "local", "on-prem", "on prem", "on-device", "on device", "offline", "air-gapped", "sovereign", "enclave",
    "within our", "this device", "this machine", "in-house",
)  # fmt: skip
_AWAY: Final = (
    "cloud", "extern", "outside", "third part", "third-part", "internet", "public api", "cross-border", "leav",
    "openai", "off-site", "offsite",
)  # fmt: skip
_STAY: Final = re.compile(
    r"\b(?:keep|process|handle|run|stays?|remains?|analy[sz]e|perform|compute|restrict(?:ed)?|processed|handled|kept"
    r"|summari[sz]e)\b[^.!?\n]{0,60}?"
    r"\b(?:locally|local only|on[- ]prem(?:ises?)?|on[- ]device|offline|air-gapped|in-house"
    r"|(?:on|within|in) (?:our|this|my|the) (?:[\w-]{1,20} ){0,2}?(?:device|machine|infrastructure|environment"
    r"|jurisdiction|data cent(?:er|re)|enclave|premises|network|cluster|cloud instance))\b"
)
_NOT: Final = re.compile(
    r"\b(?:do not|don't|dont|never|(?:must|may|shall|should) not|mustn't|shouldn't|cannot|can't|without|not?)\b"
    r"[^.!?\n]{0,50}?\b(?:"
    r"(?:send|sent|sending|upload\w*|shar(?:e|ed|ing)|transfer\w*|transmit\w*|forward\w*)\b[^.!?\n]{0,60}?"
    r"\b(?:cloud|external\w*|outside|third[- ]part\w+|internet|openai|public api|cross-border|off-?site)"
    r"|(?:leav(?:e|es|ing)) (?:our|this|my|the) (?:[\w-]{1,20} ){0,2}?"
    r"(?:device|machine|premises|infrastructure|environment|jurisdiction|data cent(?:er|re)|network|company)\b"
    r"|cloud (?:services?|inference|models?|apis?)|cross-border|public api"
    r"|external (?:apis?|services?|logging|models?))"
)
_CHINESE: Final = re.compile(
    r"本地处理|留在[^。]{0,10}本地|(?:不要|不得|不能|禁止|请勿|不可)[^。,，]{0,12}(?:外部|外传|出境|云|上传|跨境)"
    r"|不(?:得|能|要|可)?离开"
)


def says_it_stays(lowered: str) -> bool:
    """Say whether a text asks to be kept on the device or on the premises."""
    if any(word in lowered for word in _HERE) and _STAY.search(lowered):
        return True
    if any(word in lowered for word in _AWAY) and _NOT.search(lowered):
        return True
    return not lowered.isascii() and _CHINESE.search(lowered) is not None
