"""Redo the arithmetic of published numbers: ``python tools/claims_audit.py FILE [FILE ...]``.

A file holds a JSON list of ``{kind, numbers, claimed}``, or an object with such a list under
``claims``, as every benchmark here writes with ``--json``. Needs plain Python only. Exit codes: 0
all claims follow from their numbers, 1 some do not, 3 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ppstream.analysis.claims import RULES, Finding, audit_claims, claims_of
from ppstream.core.errors import ClaimError

BAD_INPUT = 3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--quiet", action="store_true", help="print only what does not hold")
    parser.epilog = f"kinds of claims: {', '.join(RULES)}"
    options = parser.parse_args(argv)
    broken = 0
    for file in options.files:
        try:
            findings = read_claims(file)
        except ClaimError as error:
            print(f"{file}: {error}", file=sys.stderr)
            return BAD_INPUT
        broken += print_findings(file, findings, quiet=options.quiet)
    return 1 if broken else 0


def read_claims(file: Path) -> list[Finding]:
    """Audit one file.

    Raises:
        ClaimError: not readable, not JSON, or no claims in it.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClaimError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ClaimError(f"not JSON: {error}") from error
    return audit_claims(claims_of(document))


def print_findings(file: Path, findings: Sequence[Finding], *, quiet: bool) -> int:
    """Returns how many do not hold."""
    for finding in findings:
        if not (quiet and finding.holds):
            print(f"{'holds ' if finding.holds else 'BROKEN'}  {finding.text}")
    broken = sum(not finding.holds for finding in findings)
    print(f"{file}: {len(findings)} claims, {broken} do not follow from their numbers")
    return broken


if __name__ == "__main__":
    sys.exit(main())
