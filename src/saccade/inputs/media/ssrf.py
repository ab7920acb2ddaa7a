"""Address checks against server-side request forgery.

URLs that two parsers could read differently are refused, and so are addresses that are not public.
"""

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from saccade.config import MediaLimits
from saccade.errors import MediaRefused

Resolve = Callable[[str, int], Sequence[str]]

MAX_URL = 8192  # characters of an http URL
_PORTS = {"http": 80, "https": 443}
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_BRACKETED = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::[0-9]*)?")
_ODD_HOST = "The URL's host is neither a name nor a plainly written address."
# The IPv6 space in public use, and the parts of it that embed IPv4 addresses (6to4, Teredo).
_PUBLIC_V6 = ipaddress.ip_network("2000::/3")
_EMBEDDED_V4 = (ipaddress.ip_network("2002::/16"), ipaddress.ip_network("2001::/32"))
_RELAY_V4 = ipaddress.ip_network("192.88.99.0/24")


@dataclass(frozen=True)
class Target:
    """A checked http or https URL."""

    scheme: str
    host: str  # lower case ASCII; an IPv6 address without brackets
    port: int
    path: str  # with the query

    @property
    def authority(self) -> str:
        """For the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def parse_url(url: str) -> Target:
    """Parses an http(s) URL strictly."""
    if len(url) > MAX_URL:
        raise MediaRefused(f"The URL has {len(url)} characters; at most {MAX_URL} are allowed.")
    if not all("!" <= character <= "~" for character in url) or "\\" in url:
        raise MediaRefused(
            "The URL contains a space, a backslash, a control or a non-ASCII character; percent-encode it"
            " (and write an international host name in its ASCII form)."
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise MediaRefused("The URL cannot be read.") from error
    if parts.scheme not in _PORTS or not parts.netloc:
        raise MediaRefused("Only http and https URLs with a host are fetched.")
    if "@" in parts.netloc:
        raise MediaRefused("The URL contains a user name or '@' before the path; remove it.")
    if "#" in url:
        raise MediaRefused("The URL contains a fragment ('#...'); remove it.")
    if port == 0:
        raise MediaRefused("The URL has the port 0.")
    host = _host(parts.netloc)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, port or _PORTS[parts.scheme], path)


def _host(netloc: str) -> str:
    """The host of a network location: a name or an address in its usual form."""
    if match := _BRACKETED.fullmatch(netloc):
        return _address(ipaddress.IPv6Address, match[1])
    host = netloc.partition(":")[0].lower().removesuffix(".")
    labels = host.split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise MediaRefused(_ODD_HOST)
    # A name that ends in a number is an address; decimal, octal, hexadecimal and short forms are refused.
    return _address(ipaddress.IPv4Address, host) if _NUMBER.fullmatch(labels[-1]) else host


def _address(kind: Callable[[str], object], text: str) -> str:
    try:
        return str(kind(text))
    except ValueError:
        raise MediaRefused(_ODD_HOST) from None


def check_domain(host: str, limits: MediaLimits) -> None:
    """`allowed_domains` holds host names; one that begins with a dot allows all its subdomains."""
    allowed = limits.allowed_domains
    if allowed is None:
        return
    for domain in (entry.lower() for entry in allowed):
        if host == domain or (domain.startswith(".") and host.endswith(domain)):
            return
    raise MediaRefused("Media may not be fetched from this host; use an allowed one or send a data URI.")


def is_public(address: str) -> bool:
    """Whether the address is public and embeds no IPv4 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if parsed.is_multicast or not parsed.is_global:
        return False
    if isinstance(parsed, ipaddress.IPv4Address):
        return parsed not in _RELAY_V4
    return parsed in _PUBLIC_V6 and not any(parsed in network for network in _EMBEDDED_V4)


def resolve_checked(target: Target, limits: MediaLimits, resolve: Resolve) -> list[str]:
    """The addresses of the host. If one of them is not public, none is used."""
    try:
        found = list(dict.fromkeys(resolve(target.host, target.port)))
    except (OSError, UnicodeError):
        found = []
    if not found:
        raise MediaRefused("The URL's host is not known.")
    if not limits.allow_private_addresses and not all(is_public(address) for address in found):
        raise MediaRefused("The URL leads to an address that is not public; send the media as a data URI.")
    return found


def system_resolve(host: str, port: int) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
