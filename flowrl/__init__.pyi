from flowrl.health.doctor import doctor as doctor
from flowrl.interface.python_calls import compare as compare
from flowrl.interface.python_calls import evaluate as evaluate
from flowrl.interface.python_calls import sample as sample
from flowrl.planning.plan import plan as plan
from flowrl.profiling.bench import bench as bench
from flowrl.runs.trained_run import read_run as read_run
from flowrl.runtime.failures import FlowrlError as FlowrlError
from flowrl.session.train import train as train

__version__: str
