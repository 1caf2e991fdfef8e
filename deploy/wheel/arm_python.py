"""Makes a Python for 64-bit Arm that runs under qemu-user on this machine.

    python deploy/wheel/arm_python.py build/arm-python
    build/arm-python/usr/bin/python3 -c "import platform; print(platform.machine())"

It comes from this machine's distribution, Debian or Ubuntu, whose Arm packages are unpacked into the folder. Nothing is
installed, and apt's own lists stay as they are. Needs apt, dpkg and qemu-user, and the standard library only.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

EMULATOR = "qemu-aarch64"
# Where a distribution keeps its packages for Arm: address, suites, components and key.
ARCHIVES = {
    "debian": (
        "http://deb.debian.org/debian",
        "{codename}",
        "main",
        "/usr/share/keyrings/debian-archive-keyring.gpg",
    ),
    "ubuntu": (
        "http://ports.ubuntu.com/ubuntu-ports",
        "{codename} {codename}-updates",
        "main universe",
        "/usr/share/keyrings/ubuntu-archive-keyring.gpg",
    ),
}


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.absolute()
    emulator = shutil.which(EMULATOR)
    if emulator is None:
        print(f"{EMULATOR} is missing; on Debian and Ubuntu: apt-get install qemu-user", file=sys.stderr)
        return 1
    apt = Apt(folder / "apt")
    apt.run("apt-get", "update")
    version = apt.python_version()
    # python3-venv depends on the pip that it puts into an environment. Wheels of C++ code need libstdc++6.
    packages = (f"python{version}-venv", f"libpython{version}-dev", "libstdc++6")
    apt.run("apt-get", "install", "--download-only", "--yes", "--no-install-recommends", *packages)
    for package in sorted(apt.downloads.glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, folder], check=True)
    shutil.rmtree(folder / "apt")
    # The packages of some releases expect that /lib is a link to /usr/lib.
    loader = folder / "lib" / "ld-linux-aarch64.so.1"
    if not loader.exists():
        (folder / "lib").symlink_to("usr/lib")
    # pyconfig.h is next to Python's headers for compilers that know the machine's own folder of headers.
    (folder / "usr/include" / f"python{version}" / "aarch64-linux-gnu").symlink_to("../aarch64-linux-gnu")
    write_command(folder / "usr/bin/python3", emulator, folder, f"usr/bin/python{version}")
    return 0


class Apt:
    """apt for the packages of 64-bit Arm, with lists and a cache of its own, in a folder."""

    def __init__(self, folder: Path) -> None:
        """Writes apt's configuration into the folder."""
        self.downloads = folder / "cache/archives"
        for name in ("state/lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        (folder / "sources.list").write_text(archive(), encoding="ascii")
        configuration = folder / "apt.conf"
        configuration.write_text(
            'APT::Architecture "arm64"; APT::Architectures { "arm64"; }; APT::Sandbox::User "root";\n'
            f'Dir::State "{folder}/state"; Dir::State::status "{folder}/status"; Dir::Cache "{folder}/cache";\n'
            f'Dir::Etc::sourcelist "{folder}/sources.list"; Dir::Etc::sourceparts "-"; Dir::Etc::preferences "-";\n'
            'Dir::Etc::preferencesparts "-";\n',
            encoding="utf-8",
        )
        self._environment = {**os.environ, "APT_CONFIG": str(configuration)}

    def run(self, *command: str) -> str:
        """Runs a command of apt, and returns its output."""
        done = subprocess.run(command, env=self._environment, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def python_version(self) -> str:
        """The distribution's Python, such as 3.11."""
        found = re.search(r"^Depends: .*\bpython(3\.\d+)\b", self.run("apt-cache", "show", "python3"), re.MULTILINE)
        if found is None:
            raise SystemExit("apt-cache show python3: no Depends with python3.N")
        return found[1]


def archive() -> str:
    """Returns the line of sources.list for this machine's distribution."""
    release = platform.freedesktop_os_release()
    if release["ID"] not in ARCHIVES:
        raise SystemExit(f"the distribution is {release['ID']}; expected {' or '.join(ARCHIVES)}")
    address, suites, components, key = ARCHIVES[release["ID"]]
    return "".join(
        f"deb [arch=arm64 signed-by={key}] {address} {suite} {components}\n"
        for suite in suites.format(codename=release["VERSION_CODENAME"]).split()
    )


def write_command(command: Path, emulator: str, folder: Path, program: str) -> None:
    """Writes a script that runs `program` of the folder under the emulator, with its own path as the program's name.

    So sys.executable is the script, and a virtual environment whose python is a link to it is found as on any machine.
    """
    command.unlink(missing_ok=True)
    command.write_text(f'#!/bin/sh\nexec {emulator} -cpu max -L {folder} -0 "$0" {folder}/{program} "$@"\n')
    command.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
