"""What the search for culprits asks of a run: a train step, or calls."""

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
        """Returns whether it is wrong, as XLA computes it too if that compiles it.

        Args:
            run: What it has given in 16 bits.
        """
        if self._criterion.fits(run):
            return False
        self._note_errors(run)
        return not self._compiled or self.wrong_in_xla()

    def right(self, layers: list) -> bool:
        """Returns whether it runs with the layers in float32, and is as good as that.

        Args:
            layers: List of layers, besides those of `demoted`.
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
            low: What `record` returned, with all other culprits repaired.
        """
        yield lambda call: check_forward(call, self._compiled)

    def located(self, culprit: Culprit, call) -> Culprit:
        """Returns the culprit with which call it is, where that counts."""
        return culprit

    def own_error(self, call) -> float:
        """Returns the error of a layer by itself, per what it may be."""
        exact = self.exact_calls.get(call.name)
        if exact is None:
            return 0.0
        with computing_in("float32", self.demoted):
            return instability(exact, 2.0**self.bits)

    def fault(self, layers: list) -> Fault:
        """What is wrong without the layers."""
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
