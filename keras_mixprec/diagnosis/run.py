"""A run that the search for culprits repeats: a train step, or calls."""

from collections.abc import Callable, Iterator

from keras_mixprec.backend import active
from keras_mixprec.diagnosis.criterion import Criterion
from keras_mixprec.diagnosis.culprit import Culprit, Fault, computes_low
from keras_mixprec.diagnosis.forward import check_forward
from keras_mixprec.diagnosis.smallest_set import instability
from keras_mixprec.numerics.layer_hooks import computing_in


class Run:
    """One run of a model on one batch, again and again.

    Args:
        model: A built `keras.Model`.
        exact: The run in float32, with its calls.
        compiled: Boolean, whether XLA compiles it.
        criterion: `Criterion` of it.

    Attributes:
        model: As given.
        demoted: List of the layers that are known to need float32.
        exact_calls: Dict from names to the `LayerCall`s of `exact`.
        bits: Float. The loss scale as a power of two.
        error: Float. How far it is off as it is; infinite if something is not
            finite.
    """

    def __init__(self, model, exact, compiled: bool, criterion: Criterion):
        self.model = model
        self.demoted: list = []
        self.exact_calls = {call.name: call for call in exact.calls}
        self.error, self.bits = 0.0, 0.0
        self._exact = exact
        self._compiled = compiled
        self._criterion = criterion

    def low(self, calls: list) -> list:
        """Returns the calls that compute in 16 bits, not demoted yet."""
        demoted = set(map(id, self.demoted))
        return [
            call
            for call in calls
            if id(call.layer) not in demoted and computes_low(call.layer)
        ]

    def wrong(self, run) -> bool:
        """Returns whether a run is wrong, under XLA too if that compiles it.

        Args:
            run: Its results in 16 bits.
        """
        if self._criterion.fits(run):
            return False
        self._note_errors(run)
        return not self._compiled or self.wrong_in_xla()

    def right(self, layers: list) -> bool:
        """Returns whether a run with the layers in float32 is right.

        Args:
            layers: List of layers, in addition to `demoted`.
        """
        try:
            with computing_in("float32", [*self.demoted, *layers]):
                return self._is_right()
        # TensorFlow and torch refuse to mix some dtypes.
        except active.replay().REFUSALS:
            return False

    def wrong_in_xla(self) -> bool:
        """Returns whether it is wrong as XLA computes it."""
        raise NotImplementedError

    def record(self, layers: list):
        """Returns the run with its calls, each free of what others do wrong.

        Args:
            layers: As for `right`.
        """
        with computing_in("float32", [*self.demoted, *layers]):
            return self._recorded()

    def own_faults(self, low) -> Iterator[Callable]:
        """Yields functions of a call to what its layer does wrong, if it does.

        Args:
            low: The result of `record`, with all other culprits repaired.
        """
        yield lambda call: check_forward(call, self._compiled)

    def located(self, culprit: Culprit, call) -> Culprit:
        """Returns the culprit, with the number of the call if that counts."""
        return culprit

    def own_error(self, call) -> float:
        """Returns a layer's own error, as a multiple of its limit."""
        exact = self.exact_calls.get(call.name)
        if exact is None:
            return 0.0
        with computing_in("float32", self.demoted):
            return instability(exact, 2.0**self.bits)

    def fault(self, layers: list) -> Fault:
        """Returns the fault of the run without the layers."""
        raise NotImplementedError

    def fault_behind(self, call) -> Fault:
        """The same of what is computed with the outputs of a layer."""
        raise NotImplementedError

    def numbers(self) -> dict:
        """Returns the evidence of what is wrong with the whole run."""
        raise NotImplementedError

    def _note_errors(self, run):
        raise NotImplementedError

    def _is_right(self):
        raise NotImplementedError

    def _recorded(self):
        raise NotImplementedError
