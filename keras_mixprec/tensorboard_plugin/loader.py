"""What TensorBoard loads through the entry point `tensorboard_plugins`.

TensorBoard does not start where this module cannot be imported; only what
`load` does is guarded. So the plugin itself is imported there.
"""

from tensorboard.plugins import base_plugin


class MixedPrecisionLoader(base_plugin.TBLoader):
    """Loads the plugin."""

    def load(self, context):
        """Returns the plugin."""
        from keras_mixprec.tensorboard_plugin.plugin import MixedPrecisionPlugin

        return MixedPrecisionPlugin(context)
