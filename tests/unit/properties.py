"""What the property tests share: how hypothesis searches, and made-up logs and costs.

The same examples every time, so that a failure is one for everybody. SELFSPEC_EXAMPLES=search searches at random, and
longer; SELFSPEC_EXAMPLES=few, which mutation testing uses, asks only whether there is a failure."""

import os

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st

from selfspec_cli.early_exit.cost_model import Costs
from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.gates import GATES, features

settings.register_profile("same", max_examples=50, derandomize=True, database=None, deadline=None)
settings.register_profile("search", max_examples=2000, database=None, deadline=None)
settings.register_profile("few", settings.get_profile("same"), max_examples=10, phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("SELFSPEC_EXAMPLES", "same"))

rates = st.floats(0, 1)
times = st.floats(1e-6, 1e3)
small = st.floats(0, 10)
costs = st.builds(Costs, plain=times, draft=st.floats(-1, 10), verify=times, verify_token=small, start=small)


@st.composite
def logs(draw, k: int = 4, full: bool = False):
    """A log of drafts of up to k tokens, any statistic in its gate's range; full: every draft has k tokens."""
    rounds = draw(st.integers(1, 12))
    drafted = torch.tensor([k if full else draw(st.integers(1, k)) for _ in range(rounds)])
    accepted = torch.tensor([draw(st.integers(0, int(length))) for length in drafted])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spans = [GATES[name].statistic_range(100) for name in features()]
    statistics = torch.stack(
        [low + (high - low) * torch.rand(rounds, k, generator=generator) for low, high in spans], dim=-1
    )
    statistics[torch.arange(k) >= drafted.unsqueeze(1)] = torch.nan
    return DraftLog(statistics, drafted, accepted, torch.arange(rounds) // 2, features())
