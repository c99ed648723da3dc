"""A target with a planted bug, for the test of the runner. planted.c is the same in C."""


def fails(data: bytes) -> None:
    if data.startswith(b"bad"):
        raise ValueError("planted")
