"""The public names, for type checkers and editors."""

from keras_mixprec.analysis.comparison.result import (
    ComparisonResult as ComparisonResult,
)
from keras_mixprec.analysis.comparison.run import (
    compare_precisions as compare_precisions,
)
from keras_mixprec.analysis.doctor.run import doctor as doctor
from keras_mixprec.analysis.largest_batch import (
    largest_batch as largest_batch,
)
from keras_mixprec.analysis.lint.lint import lint as lint
from keras_mixprec.analysis.minimize_float32 import (
    minimize_float32 as minimize_float32,
)
from keras_mixprec.callbacks.monitor import MixPrecMonitor as MixPrecMonitor
from keras_mixprec.callbacks.tuner import PrecisionTuner as PrecisionTuner
from keras_mixprec.diagnosis.examination import diagnose as diagnose
from keras_mixprec.diagnosis.verdict import Verdict as Verdict
from keras_mixprec.inference.convert import (
    convert_for_inference as convert_for_inference,
)
from keras_mixprec.inference.diagnose_call import (
    diagnose_call as diagnose_call,
)
from keras_mixprec.inference.report import ConversionReport as ConversionReport
from keras_mixprec.inference.saved_weights import save_weights as save_weights
from keras_mixprec.loss_scaling.ensure import (
    ensure_loss_scaling as ensure_loss_scaling,
)
from keras_mixprec.loss_scaling.optimizer import (
    LossScaleOptimizer as LossScaleOptimizer,
)
from keras_mixprec.loss_scaling.rules import (
    DynamicLossScale as DynamicLossScale,
)
from keras_mixprec.loss_scaling.rules import (
    FixedLossScale as FixedLossScale,
)
from keras_mixprec.loss_scaling.rules import (
    ScheduledLossScale as ScheduledLossScale,
)
from keras_mixprec.policies.apply import apply_policy as apply_policy
from keras_mixprec.policies.default_rules import DEFAULT_RULES as DEFAULT_RULES
from keras_mixprec.policies.graph_rewrite import graph_rewrite as graph_rewrite
from keras_mixprec.policies.hardware import (
    Recommendation as Recommendation,
)
from keras_mixprec.policies.hardware import (
    recommend_policy as recommend_policy,
)
from keras_mixprec.policies.matmul_precision import (
    matmul_precision as matmul_precision,
)
from keras_mixprec.policies.matmul_precision import (
    set_matmul_precision as set_matmul_precision,
)
from keras_mixprec.policies.plan import PrecisionPlan as PrecisionPlan
from keras_mixprec.policies.rescaled import RescaledPolicy as RescaledPolicy
from keras_mixprec.policies.rules import (
    PrecisionRule as PrecisionRule,
)
from keras_mixprec.policies.rules import (
    PrecisionRules as PrecisionRules,
)
from keras_mixprec.policies.scope import (
    global_policy as global_policy,
)
from keras_mixprec.policies.scope import (
    policy_scope as policy_scope,
)
from keras_mixprec.policies.scope import (
    set_global_policy as set_global_policy,
)
from keras_mixprec.policies.summary import (
    precision_summary as precision_summary,
)
from keras_mixprec.reporting.report import load_report as load_report

__version__: str
__all__: list[str]
