"""What pyproject.toml cannot say: a .pth file goes beside the packages, so that Python reads it at its start."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HOOK = "ncclguard_observe.pth"


class BuildWithHook(build_py):
    """Also copies the file to where the packages are; an editable install has no such place."""

    def run(self) -> None:
        """Build."""
        super().run()
        if not self.editable_mode:
            self.copy_file(str(Path(__file__).parent / "ncclguard_observe" / HOOK), str(Path(self.build_lib, HOOK)))


setup(cmdclass={"build_py": BuildWithHook})
