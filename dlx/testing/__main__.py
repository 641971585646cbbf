"""``python -m dlx.testing NAME...``: grade libraries, print tables or JSON.

Exit status: 0 all promises kept or excepted, 1 a promise is broken, 2 grading or printing failed; 130 interrupted,
141 the reader of the output is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

from dlx._support.reflect import exception_text
from dlx._support.screen import Screen
from dlx._support.stdout import own_stdout, silence
from dlx._version import __version__
from dlx.testing.check import CHECKS, KINDS, excepting, of_kinds, parse_exceptions
from dlx.testing.gpu_report import report_gpu
from dlx.testing.report import SCHEMA, Grades, convert_to_json, print_grades
from dlx.testing.runner import run
from dlx.testing.subject import LIBRARIES, find


def _create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m dlx.testing", description="Check the promises of DLPack libraries and dlx adapters.",
        epilog="Exit status: 0 all kept or excepted, 1 a promise is broken, "
        "2 grading or printing failed.",
    )  # fmt: skip
    known = ", ".join(LIBRARIES)
    parser.add_argument(
        "subjects", nargs="*", metavar="NAME", help=f"adapter of dlx, module:attribute of a Subject, or: {known}"
    )
    parser.add_argument("--only", action="append", default=[], metavar="CHECK", help="run this check; repeatable")
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="KINDS", help="of: producer,consumer,adapter")
    parser.add_argument(
        "--except", dest="excepted", action="append", default=[], metavar="CHECK=REASON",
        help="accept this broken promise, and why",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--gpu", action="store_true",
        help="check dlx on this machine's CUDA devices with the installed frameworks, or NAMEs; write a report",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the checks and exit; as JSON with --json")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Grade the named subjects; return the exit status."""
    try:
        status = _grade(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        silence(sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # `python -m dlx.testing numpy | head`
            return 141
        print(f"python -m dlx.testing: writing failed: {error.strerror or error}", file=sys.stderr)
        return 2


def _grade(arguments: list[str] | None) -> int:
    parser = _create_parser()
    options = parser.parse_args(arguments)
    if options.gpu:
        if options.json or options.list or options.excepted or options.kinds != ",".join(KINDS):
            parser.error("--gpu takes only the names of frameworks and --only")
        return report_gpu(options.subjects, options.only)
    if options.list:
        _list(as_plain_data=options.json)
        return 0
    if not options.subjects:
        parser.error("name a subject, for example: numpy")
    kinds, only = tuple(options.kinds.split(",")), tuple(options.only)
    wrong = [name for name in only if name not in CHECKS] + [kind for kind in kinds if kind not in KINDS]
    if wrong:
        parser.error(f"there is no {', '.join(wrong)}. --list shows all checks; kinds are {', '.join(KINDS)}.")
    grades, errors = [], []
    for spec in options.subjects:
        try:
            with own_stdout():  # a library's output goes to stderr
                subject = excepting(find(spec), parse_exceptions(options.excepted))
                checks = of_kinds(subject, kinds, only)
                if not checks:
                    raise LookupError(f"no check applies; it supports {', '.join(subject.kinds) or 'nothing'}")
                grades.append(Grades(subject, subject.version(), tuple(run(subject, checks))))
        except (LookupError, ImportError, ValueError, RuntimeError) as error:
            print(f"{spec}: {error}", file=sys.stderr)
            errors.append({"subject": spec, "message": str(error)})
            continue
        if not options.json:
            print_grades(grades[-1], Screen(parser.prog))
    if options.json:
        print(json.dumps({**convert_to_json(grades), "errors": errors}, indent=1))
    return 2 if errors else max(each.status for each in grades)


def _list(*, as_plain_data: bool) -> None:
    if as_plain_data:
        facts = ("name", "kind", "about", "severity", "promise")
        rows = [{fact: getattr(check, fact) for fact in facts} for check in CHECKS.values()]
        print(json.dumps({"schema": SCHEMA, "dlx": __version__, "checks": rows}, indent=1))
        return
    for check in CHECKS.values():
        print(f"{check.kind:<9} {check.name:<24} {check.severity:<9} {check.promise}")


def _run_worker(order: str, pipe: int) -> None:
    """Run the checks that `runner` requests; report each start and verdict on a pipe."""
    wanted = json.loads(order)
    with os.fdopen(pipe, "w", buffering=1) as report:
        try:
            subject = excepting(find(wanted["spec"]), wanted["exceptions"])
        except Exception as error:
            report.write(f"failed {json.dumps(exception_text(error))}\n")
            return
        for name in wanted["checks"]:
            report.write(f"begin {name}\n")
            report.write(f"end {json.dumps(asdict(CHECKS[name](subject)))}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        _run_worker(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
