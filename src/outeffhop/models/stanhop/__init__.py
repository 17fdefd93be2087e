"""STanHop-Net, a Hopfield network for multivariate time series, as a transformers model."""

from transformers import AutoConfig, AutoModel, AutoModelForTimeSeriesPrediction

from outeffhop.models.stanhop.configuration import StanhopConfig
from outeffhop.models.stanhop.modeling import StanhopForecast, StanhopForForecasting

__all__ = ["StanhopConfig", "StanhopForForecasting", "StanhopForecast"]

AutoConfig.register(StanhopConfig.model_type, StanhopConfig, exist_ok=True)
AutoModel.register(StanhopConfig, StanhopForForecasting, exist_ok=True)
AutoModelForTimeSeriesPrediction.register(StanhopConfig, StanhopForForecasting, exist_ok=True)
