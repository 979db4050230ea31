"""The plugin: the page and its data, served by TensorBoard."""

from tensorboard import errors, plugin_util
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from keras_mixprec.reporting.schema import PLUGIN_NAME
from keras_mixprec.tensorboard_plugin.endpoints import Endpoints, RefusedError
from keras_mixprec.tensorboard_plugin.provider_source import (
    ProviderRuns,
    read_tags,
)


class MixedPrecisionPlugin(base_plugin.TBPlugin):
    """Serves runs, as `MixPrecMonitor` logs them, to the page.

    Args:
        context: TensorBoard's `TBContext`.
    """

    plugin_name = PLUGIN_NAME

    def __init__(self, context):
        self._provider = context.data_provider
        self._read = read_tags()
        self._endpoints = Endpoints()

    def is_active(self):
        """TensorBoard finds by itself that there are data."""
        return False

    def frontend_metadata(self):
        """What the tab is called, and where its page begins."""
        return base_plugin.FrontendMetadata(
            es_module_path="/static/page.js", tab_name="Mixed Precision"
        )

    def get_plugin_apps(self):
        """The routes; what they answer is in `endpoints.py`."""
        names = ("runs", "summaries", "comparison", "run", "heat")
        names += ("histogram", "ranges")
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
        asked = {
            "ctx": plugin_util.context(request.environ),
            "experiment_id": plugin_util.experiment_id(request.environ),
        }
        runs = ProviderRuns(self._provider, asked, self._read)
        return self._endpoints.data(runs, name, request.args)


class _RefusedError(errors.PublicError):
    """TensorBoard answers with its status and message."""

    def __init__(self, error):
        super().__init__(str(error))
        self.http_code = error.status


def _check_method(request):
    if request.method not in ("GET", "HEAD"):
        raise RefusedError(405, f"Only GET. Received: {request.method}")
