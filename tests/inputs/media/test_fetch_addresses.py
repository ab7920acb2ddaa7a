"""Where a URL may lead: read strictly, public addresses only."""

import pytest

from saccade.config import MediaLimits
from saccade.errors import MediaRefused
from saccade.inputs.media.fetch import check_domain, is_public, parse_url, resolve_checked


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://example.com", "example.com", 80, "/"),
        ("https://Example.COM:8443/a%20b?c=d&e", "example.com", 8443, "/a%20b?c=d&e"),
        ("https://example.com.:443/", "example.com", 443, "/"),
        ("http://93.184.216.34/x", "93.184.216.34", 80, "/x"),
        ("http://[2606:2800::1]:81/", "2606:2800::1", 81, "/"),
        ("https://xn--bcher-kva.example/", "xn--bcher-kva.example", 443, "/"),
    ],
)
def test_plain_urls_are_read(url: str, host: str, port: int, path: str) -> None:
    target = parse_url(url)
    assert (target.host, target.port, target.path) == (host, port, path)


@pytest.mark.parametrize(
    "url",
    [
        r"http://good.example\@evil.example/",
        "http://user@evil.example/",
        "http://user:pass@evil.example/",
        "http://good.example#@evil.example/",
        "http://evil.example/x#fragment",
        "http://127。0。0。1/",
        "http://１２７.0.0.1/",
        "http://exämple.com/",
        "http://ex ample.com/",
        "http://example.com/a b",
        "http://example.com/\r\nX: y",
        "http://example.com/\x00",
        "http://exa%6dple.com/",
        "http://[::1%25eth0]/",
        "http://[::1",
        "http://[v1.x]/",
        "http://:80/",
        "http:///path",
        "http:path",
        "http://example..com/",
        "http://-example.com/",
        "http://example.com:99999/",
        "http://example.com:0/",
        "http://example.com:8_0/",
        "http://" + "a" * 300 + ".com/",
        "http://example.com/" + "a" * 9000,
        "ftp://example.com/",
        "//example.com/",
        # not plainly written addresses
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.0.0.1/",
        "http://017700000001/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://127.0.0.1.0x0/",
        "http://1.2.3.4.5/",
    ],
)
def test_urls_that_could_be_read_in_two_ways_are_refused(url: str) -> None:
    with pytest.raises(MediaRefused):
        parse_url(url)


PRIVATE = [
    "127.0.0.1",
    "127.255.255.254",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "192.0.0.1",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "::ffff:127.0.0.1",
    "::ffff:93.184.216.34",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::5db8:d822",
    "2002:7f00:1::",
    "2002:5db8:d822::",
    "2001:0:5db8:d822::1",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "2001:db8::1",
    "not an address",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public_are_recognised(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946"])
def test_public_addresses_are_recognised(address: str) -> None:
    assert is_public(address)


def test_one_private_address_among_public_ones_refuses_the_host() -> None:
    target = parse_url("http://mixed.example/")
    with pytest.raises(MediaRefused, match="not public"):
        resolve_checked(target, MediaLimits(), lambda host, port: ["93.184.216.34", "10.0.0.1"])
    with pytest.raises(MediaRefused, match="not known"):
        resolve_checked(target, MediaLimits(), lambda host, port: [])


def test_refusals_do_not_reveal_addresses() -> None:
    with pytest.raises(MediaRefused) as caught:
        resolve_checked(parse_url("http://inside.example/"), MediaLimits(), lambda host, port: ["10.1.2.3"])
    assert "10.1.2.3" not in caught.value.message


def test_allowed_domains_are_exact_unless_they_begin_with_a_dot() -> None:
    limits = MediaLimits(allowed_domains=("good.example", ".wide.example"))
    check_domain("good.example", limits)
    check_domain("a.wide.example", limits)
    for host in ("bad.example", "a.good.example", "notgood.example", "wide.example", "xwide.example"):
        with pytest.raises(MediaRefused, match="allowed"):
            check_domain(host, limits)
    with pytest.raises(MediaRefused):
        check_domain("any.example", MediaLimits(allowed_domains=()))
    check_domain("any.example", MediaLimits())
