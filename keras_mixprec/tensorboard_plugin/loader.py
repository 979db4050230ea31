"""What TensorBoard loads through the entry point `tensorboard_plugins`.

TensorBoard does not start where this module cannot be imported or `fix_flags`
raises; only what `load` does is guarded. So the plugin itself is imported
there.
"""

import contextlib

from tensorboard.plugins import base_plugin


class MixedPrecisionLoader(base_plugin.TBLoader):
    """Loads the plugin."""

    def fix_flags(self, flags):
        """Lets the data server keep all that we log.

        It keeps 100 values of a tag, or 10, unless it is set otherwise; 0 is
        for all. A user's own number stays.
        """
        # Whatever goes wrong here would stop TensorBoard, which can do without.
        with contextlib.suppress(Exception):
            from keras_mixprec.reporting.schema import PLUGIN_NAME

            flags.samples_per_plugin.setdefault(PLUGIN_NAME, 0)

    def load(self, context):
        """Returns the plugin."""
        from keras_mixprec.tensorboard_plugin.plugin import MixedPrecisionPlugin

        return MixedPrecisionPlugin(context)
