"""The curve of Ed25519 in plain integers, for signatures that no honest signer makes (RFC 8032, 5.1)."""

import hashlib

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, P) % P
_SQRT_MINUS_1 = pow(2, (P - 1) // 4, P)

Point = tuple[int, int, int, int]
"""X, Y, Z and T of extended coordinates."""
IDENTITY: Point = (0, 1, 1, 0)


def add(a: Point, b: Point) -> Point:
    minus = (a[1] - a[0]) * (b[1] - b[0])
    plus = (a[1] + a[0]) * (b[1] + b[0])
    t, z = 2 * a[3] * b[3] * _D, 2 * a[2] * b[2]
    e, f, g, h = plus - minus, z - t, z + t, plus + minus
    return e * f % P, g * h % P, f * g % P, e * h % P


def multiply(scalar: int, point: Point) -> Point:
    product = IDENTITY
    for bit in bin(scalar)[2:]:
        product = add(product, product)
        if bit == "1":
            product = add(product, point)
    return product


def is_identity(point: Point) -> bool:
    return point[0] == 0 and point[1] == point[2]


def negative(point: Point) -> Point:
    return -point[0] % P, point[1], point[2], -point[3] % P


def encode(point: Point) -> bytes:
    inverse = pow(point[2], -1, P)
    x, y = point[0] * inverse % P, point[1] * inverse % P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def decode(encoded: bytes) -> Point | None:
    """The point with this canonical encoding."""
    number = int.from_bytes(encoded, "little")
    y, sign = number % 2**255, number >> 255
    square = (y * y - 1) * pow(_D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if x * x % P != square:
        x = x * _SQRT_MINUS_1 % P
    if y >= P or x * x % P != square or (x == 0 and sign):
        return None
    if x & 1 != sign:
        x = P - x
    return x, y, 1, x * y % P


def _base() -> Point:
    point = decode((4 * pow(5, -1, P) % P).to_bytes(32, "little"))
    assert point is not None
    return point


def _torsion() -> list[Point]:
    point = decode(bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"))
    assert point is not None
    return [multiply(n, point) for n in range(8)]


BASE = _base()
TORSION = _torsion()
"""The points whose order divides 8."""


def challenge(r: bytes, key: bytes, message: bytes) -> int:
    return int.from_bytes(hashlib.sha512(r + key + message).digest(), "little") % L


def is_signature(key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether [8]([s]B - [k]A - R) is the identity, with s below L and R encoded canonically."""
    a, r, s = decode(key), decode(signature[:32]), int.from_bytes(signature[32:], "little")
    if a is None or r is None or s >= L:
        return False
    k = challenge(signature[:32], key, message)
    residue = add(multiply(s, BASE), negative(add(multiply(k, a), r)))
    return is_identity(multiply(8, residue))
