"""A TensorBoard with one more plugin, run as a script by the tests.

The plugin lists what the data provider serves under our plugin's name.
"""

import json
import sys
import types

from tensorboard import default, plugin_util, program
from tensorboard.backend import http_util
from tensorboard.data import provider
from tensorboard.plugins import base_plugin
from werkzeug import wrappers


class Probe(base_plugin.TBPlugin):
    """Serves the last sample of each of our plugin's tags."""

    plugin_name = "probe"

    def __init__(self, context):
        self._provider = context.data_provider

    def is_active(self):
        return False

    def get_plugin_apps(self):
        return {"/tensors": self._tensors}

    @wrappers.Request.application
    def _tensors(self, request):
        asked = {
            "ctx": plugin_util.context(request.environ),
            "experiment_id": "",
            "plugin_name": "mixed_precision",
        }
        listed = self._provider.list_tensors(**asked).get("mixprec", {})
        read = self._provider.read_tensors(
            **asked,
            downsample=1 << 30,
            run_tag_filter=provider.RunTagFilter(runs=["mixprec"]),
        ).get("mixprec", {})
        tags = {
            tag: {
                "content": json.loads(series.plugin_content),
                "step": read[tag][-1].step,
                "last": _jsonable(read[tag][-1].numpy),
            }
            for tag, series in listed.items()
        }
        return http_util.Respond(request, tags, "application/json")


def _jsonable(array):
    items = array.ravel().tolist()
    return [x.decode() if isinstance(x, bytes) else x for x in items]


if __name__ == "__main__":
    # TensorBoard's own switch for doing without TensorFlow, whose import
    # takes it 10 s.
    sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
    server = program.TensorBoard([*default.get_plugins(), Probe])
    address = ["--host", "127.0.0.1", "--port", "0", "--reload_interval", "1"]
    server.main(server.configure(["tensorboard", *address, *sys.argv[1:]]))
