"""``python -m ppstream.gateway``, as rank 0 starts it."""

from ppstream.gateway.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
