"""The plugin with which TensorBoard serves the page and its data."""

import os

from tensorboard import errors
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from keras_mixprec.reporting.schema import PLUGIN_NAME
from keras_mixprec.tensorboard_plugin.endpoints import (
    ROUTES,
    Endpoints,
    RefusedError,
    check_method,
)


class MixedPrecisionPlugin(base_plugin.TBPlugin):
    """Serves the logs of `MixPrecMonitor` to the page.

    Args:
        context: TensorBoard's `TBContext`.
    """

    plugin_name = PLUGIN_NAME

    def __init__(self, context):
        self._endpoints = Endpoints(_folders(context.flags))

    def is_active(self):
        """Returns whether there is any run."""
        return bool(self._endpoints.listed())

    def frontend_metadata(self):
        """Returns the name of the tab and the module of the page."""
        return base_plugin.FrontendMetadata(
            es_module_path="/static/page.js", tab_name="Mixed Precision"
        )

    def get_plugin_apps(self):
        """Returns the routes. `endpoints.py` makes the answers."""
        data = {f"/data/{name}": self._app(self._data) for name in ROUTES}
        return {"/static/*": self._app(self._static), **data}

    def _app(self, answer):
        @wrappers.Request.application
        def app(request):
            try:
                check_method(request.method)
                name = request.path.rpartition("/")[2]
                return http_util.Respond(request, *answer(request, name))
            except RefusedError as error:
                raise _RefusedError(error) from error

        return app

    def _static(self, request, name):
        return self._endpoints.static(name)

    def _data(self, request, name):
        return self._endpoints.data(name, request.args)


def _folders(flags):
    """Returns the folders that TensorBoard reads, by name."""
    if flags.logdir:
        return {"": os.path.expanduser(flags.logdir)}
    named = (x.partition(":") for x in (flags.logdir_spec or "").split(","))
    # A folder without a name gets its path as a name, as in TensorBoard.
    found = {name: path or name for name, _, path in named if name}
    return {name: os.path.expanduser(path) for name, path in found.items()}


class _RefusedError(errors.PublicError):
    """An error whose status and message TensorBoard sends."""

    def __init__(self, error):
        super().__init__(str(error))
        self.http_code = error.status
