"""An arm whose RMSNorm mixes up its columns, put in place as the runner is imported."""

import sys


class Wrong:
    """An import hook that finds nothing, but is asked."""

    def find_spec(self, name, path=None, target=None):
        if name == "freetoken.runner.model_runner":
            sys.meta_path.remove(self)
            from freetoken.kernels.rms_norm import reference

            real = reference.rms_norm
            reference.rms_norm = lambda x, *rest: real(x.roll(1, -1), *rest)


sys.meta_path.insert(0, Wrong())
