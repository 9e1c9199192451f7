from flowrl.comparing.compare import compare as compare
from flowrl.comparing.sweep.sweep import sweep as sweep
from flowrl.evaluation.board.board import leaderboard as leaderboard
from flowrl.evaluation.evaluate import evaluate as evaluate
from flowrl.evaluation.realism import realism as realism
from flowrl.evaluation.reward_card.reward_card import reward_card as reward_card
from flowrl.evaluation.rubric import rubric as rubric
from flowrl.evaluation.score import score as score
from flowrl.generation.sample import sample as sample
from flowrl.health.doctor import doctor as doctor
from flowrl.migrating.init import init as init
from flowrl.migrating.prompt_sets import fetch_prompts as fetch_prompts
from flowrl.pages.report import report as report
from flowrl.planning.plan import plan as plan
from flowrl.pretraining.pretrain import pretrain as pretrain
from flowrl.profiling.bench import bench as bench
from flowrl.publishing.export import export as export
from flowrl.publishing.merge import merge as merge
from flowrl.publishing.model_index import model_card as model_card
from flowrl.publishing.push import push as push
from flowrl.runs.trained_run import read_run as read_run
from flowrl.runtime.failures import FlowrlError as FlowrlError
from flowrl.serving.serve import serve as serve
from flowrl.session.train import train as train

__version__: str
_PLACES: dict[str, str]
