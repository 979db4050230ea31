"""The loader of the plugin, for the entry point `tensorboard_plugins`.

TensorBoard does not start if it cannot import this module. TensorBoard
guards only `load`, which therefore imports the plugin.
"""

from tensorboard.plugins import base_plugin


class MixedPrecisionLoader(base_plugin.TBLoader):
    """Loads the plugin."""

    def load(self, context):
        """Returns the plugin."""
        from keras_mixprec.tensorboard_plugin.plugin import MixedPrecisionPlugin

        return MixedPrecisionPlugin(context)
