"""A target with a mistake in it, for the test of those who find it. planted.c is the same in C."""


def fails(data: bytes) -> None:
    if data.startswith(b"bad"):
        raise ValueError("planted")
