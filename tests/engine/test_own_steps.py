"""An optimizer's step of the script's own, beside the one that a training step has made, is an error and no second
update; what an update may do with the gradients does not change by being watched."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from launching import launch, small
from nodes import gap
from paceline.engine.compute import optimizer_step

TOLD = "optimizer.step.. was called beside pace.step"


def joined(engine="sequential"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, paceline.join(model, optimizer, F.cross_entropy, batch_size=8, engine=engine)


def batch():
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randint(0, 3, (8,))


def weights(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("engine", ["sequential", "threads:2", "replicas:2", "reproducible:4"])
def test_a_second_step_is_refused_and_changes_nothing(engine):
    model, optimizer, pace = joined(engine)
    with pace:
        pace.step(batch())
        before = weights(model)
        with pytest.raises(RuntimeError, match=TOLD):
            optimizer.step()
        assert gap(weights(model), before) == 0.0
        pace.step(batch())
    optimizer.step()  # the script's own again
    assert gap(weights(model), before) > 0


def test_a_second_step_of_an_own_loop_is_refused():
    model, optimizer, pace = joined()
    inputs, targets = batch()
    with pace:
        pace.backward(F.cross_entropy(model(inputs), targets), rows=8)
        pace.update()
        with pytest.raises(RuntimeError, match=TOLD):
            optimizer.step()


def test_a_scheduler_made_later_sees_the_updates(recwarn):
    """It puts a function of its own around `optimizer.step`."""
    _, optimizer, pace = joined()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pace:
        pace.step(batch())
        scheduler.step()
        pace.step(batch())
        with pytest.raises(RuntimeError, match=TOLD):
            optimizer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert not [each for each in recwarn if "lr_scheduler" in str(each.message)]


def test_a_step_before_the_first_is_the_scripts_own():
    """To lay out its state, say."""
    _, optimizer, pace = joined()
    with pace:
        optimizer.step()
        pace.step(batch())


def test_to_be_watched_is_not_to_be_hooked():
    _, optimizer, pace = joined()
    with pace:
        assert optimizer_step.optimizer_takes_factors(optimizer)
        pace.step(batch())
        assert optimizer_step.optimizer_takes_factors(optimizer)
        optimizer.register_step_post_hook(lambda *_: None)
        assert not optimizer_step.optimizer_takes_factors(optimizer)
    assert not optimizer._optimizer_step_pre_hooks


def test_processes_that_share_their_weights_are_told(tmp_path):
    """Story: both of them took the step once more, on the same weights."""
    script = small(tmp_path, "pace.step((torch.ones(4, 4), torch.zeros(4, dtype=torch.long)))", "optimizer.step()")
    assert "was called beside pace.step" in launch(str(script), engine="processes:2", code=1).stderr
