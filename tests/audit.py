"""Known vulnerabilities of what is installed: red in ``make check``. Asked by pip-audit, of OSV or of PyPI.

Where neither can be reached the audit says so and does not stand in the way: someone who works without a network has no
fewer vulnerabilities, but can do nothing about them there. Never does "nothing was asked" look like "nothing is known".
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

OSV, PYPI = "https://api.osv.dev/v1/query", "https://pypi.org/pypi"
PATIENCE = 3.0
#: Advisories that do not concern this project, each with the reason.
IGNORED: dict[str, str] = {}


def osv_answers(url: str) -> bool:
    """Whether somebody there knows of an old and famous vulnerability."""
    asked = json.dumps({"version": "2.4.1", "package": {"name": "jinja2", "ecosystem": "PyPI"}}).encode()
    try:
        request = urllib.request.Request(url, asked, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return bool(json.load(answer).get("vulns"))
    except (OSError, ValueError, AttributeError):
        return False


def pypi_answers(url: str) -> bool:
    """The same of the package index: a mirror of the packages alone knows nothing of it."""
    try:
        with urllib.request.urlopen(f"{url}/jinja2/2.4.1/json", timeout=PATIENCE) as answer:
            return bool(json.load(answer).get("vulnerabilities"))
    except (OSError, ValueError, AttributeError):
        return False


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--osv", default=OSV, help="where OSV answers")
    parser.add_argument("--pypi", default=PYPI, help="where PyPI answers")
    parser.add_argument("--requirement", help="a file of pinned packages, instead of what is installed")
    asked = parser.parse_args(words)
    if osv_answers(asked.osv):
        service = ["--vulnerability-service", "osv", "--osv-url", asked.osv]
    elif pypi_answers(asked.pypi):
        service = ["--vulnerability-service", "pypi"]
    else:
        print(f"dependencies NOT audited: neither {asked.osv} nor {asked.pypi} answers from here")
        return 0
    what = ["--requirement", asked.requirement, "--no-deps", "--disable-pip"] if asked.requirement else ["--local"]
    ignored = [word for id in IGNORED for word in ("--ignore-vuln", id)]
    began = time.monotonic()
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--timeout", "10"]
    ended = subprocess.run([*command, *service, *what, *ignored, "--skip-editable"], capture_output=True, text=True)
    try:
        found = json.loads(ended.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        print(f"dependencies NOT audited: pip-audit gave up: {ended.stderr.strip()[-500:]}")
        return 0
    audited = [one for one in found if "vulns" in one]
    known = [(one, vulnerability) for one in audited for vulnerability in one["vulns"]]
    for one, vulnerability in known:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"{one['name']} {one['version']}: {vulnerability['id']}: {vulnerability['description'][:150]}")
        print(
            f"Try: {one['name']} {fixed}; or, where it does not concern us, IGNORED in tests/audit.py with the reason"
        )
    left = len(found) - len(audited)
    seconds = time.monotonic() - began
    print(
        f"{len(audited)} packages audited in {seconds:.0f} s, {left} unknown there, {len(known)} vulnerabilities known"
    )
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main())
