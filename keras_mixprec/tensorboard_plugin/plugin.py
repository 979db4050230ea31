"""The plugin: the page and its data, served by TensorBoard."""

import os

from tensorboard import errors
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from keras_mixprec.reporting.schema import PLUGIN_NAME
from keras_mixprec.tensorboard_plugin.endpoints import Endpoints, RefusedError
from keras_mixprec.tensorboard_plugin.log_folder import LogFolder


class MixedPrecisionPlugin(base_plugin.TBPlugin):
    """Serves runs, as `MixPrecMonitor` logs them, to the page.

    Args:
        context: TensorBoard's `TBContext`.
    """

    plugin_name = PLUGIN_NAME

    def __init__(self, context):
        self._runs = LogFolder(_folders(context.flags))
        self._endpoints = Endpoints()

    def is_active(self):
        """Whether there are data."""
        return bool(self._runs.listed())

    def frontend_metadata(self):
        """What the tab is called, and where its page begins."""
        return base_plugin.FrontendMetadata(
            es_module_path="/static/page.js", tab_name="Mixed Precision"
        )

    def get_plugin_apps(self):
        """The routes; what they answer is in `endpoints.py`."""
        names = ("runs", "summaries", "run", "heat", "histogram", "what_if")
        data = {f"/data/{name}": self._app(self._data, name) for name in names}
        return {"/static/*": self._app(self._static), **data}

    def _app(self, answer, *arguments):
        @wrappers.Request.application
        def app(request):
            try:
                _check_method(request)
                found = answer(request, *arguments)
            except RefusedError as error:
                raise _RefusedError(error) from error
            return http_util.Respond(request, *found)

        return app

    def _static(self, request):
        return self._endpoints.static(request.path.rpartition("/static/")[2])

    def _data(self, request, name):
        return self._endpoints.data(self._runs, name, request.args)


def _folders(flags):
    """What TensorBoard reads: `--logdir`, or the named ones of a list."""
    if flags.logdir:
        return {"": os.path.expanduser(flags.logdir)}
    named = (x.partition(":") for x in (flags.logdir_spec or "").split(","))
    # What has no name is called by its path.
    found = {name: path or name for name, _, path in named if name}
    return {name: os.path.expanduser(path) for name, path in found.items()}


class _RefusedError(errors.PublicError):
    """TensorBoard answers with its status and message."""

    def __init__(self, error):
        super().__init__(str(error))
        self.http_code = error.status


def _check_method(request):
    if request.method not in ("GET", "HEAD"):
        raise RefusedError(405, f"Only GET. Received: {request.method}")
