"""An arm whose RMSNorm takes eight milliseconds longer, put in place as the runner is imported."""

import sys
import time


class Slowed:
    """An import hook that finds nothing, but is asked."""

    def find_spec(self, name, path=None, target=None):
        if name == "freetoken.runner.model_runner":
            sys.meta_path.remove(self)
            from freetoken.kernels.rms_norm import reference

            real = reference.rms_norm

            def rms_norm(*arguments):
                time.sleep(0.008)
                return real(*arguments)

            reference.rms_norm = rms_norm


sys.meta_path.insert(0, Slowed())
