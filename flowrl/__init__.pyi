from flowrl.comparing.compare import compare as compare
from flowrl.comparing.sweep.sweep import sweep as sweep
from flowrl.generation.sample import sample as sample
from flowrl.interface.python_calls import evaluate as evaluate
from flowrl.interface.python_calls import plan as plan
from flowrl.interface.python_calls import read_run as read_run
from flowrl.interface.python_calls import train as train
from flowrl.migrating.init import init as init
from flowrl.pages.report import report as report
from flowrl.publishing.export import export as export
from flowrl.publishing.merge import merge as merge
from flowrl.publishing.push import push as push
from flowrl.runtime.failures import FlowrlError as FlowrlError
from flowrl.serving.serve import serve as serve

__version__: str
