"""The command `tcpx`, also as `python -m tcpx`."""

import os
import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """Replaces this process by the command that came with the package."""
    command = Path(__file__).parent / "bin" / "tcpx"
    if not command.is_file():
        sys.exit(f"error: {command} does not exist: this package was built without the command")
    os.execv(command, ["tcpx", *sys.argv[1:]])


if __name__ == "__main__":
    main()
