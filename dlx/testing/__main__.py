"""``python -m dlx.testing NAME...``: grade libraries, print a table, write a report."""

from __future__ import annotations

import argparse
import sys

from dlx.testing import CHECKS, find, of_kinds, run
from dlx.testing.check import KINDS
from dlx.testing.plugin import declared
from dlx.testing.running import work


def main(arguments: list[str] | None = None) -> int:
    """Grade what is named; return 0 (all kept), 1 (something is broken) or 2 (it could not be graded)."""
    parser = argparse.ArgumentParser("python -m dlx.testing", description=__doc__)
    parser.add_argument("subjects", nargs="*", metavar="NAME", help="an adapter, a known library, or module:attribute")
    parser.add_argument("--only", action="append", default=[], metavar="CHECK", help="this check only; may be repeated")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of: producer, consumer, adapter")
    parser.add_argument("--except", dest="excepted", action="append", default=[], metavar="CHECK=REASON")
    options = parser.parse_args(arguments)
    broken = False
    for spec in options.subjects:
        try:
            subject = find(spec).excepting(declared(options.excepted))
        except (LookupError, ImportError, ValueError) as error:
            print(f"{spec}: {error}", file=sys.stderr)
            return 2
        for verdict in run(subject, of_kinds(subject, tuple(options.kinds.split(",")), tuple(options.only))):
            print(f"{verdict.subject:12} {verdict.status:8} {verdict.check:28} {verdict.reason or verdict.seen}")
            broken |= verdict.status in ("breaks", "error")
            if verdict.status == "breaks":
                print(CHECKS[verdict.check].reproduction(subject))
    return int(broken)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
