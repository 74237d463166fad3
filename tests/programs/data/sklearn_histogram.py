# needs: sklearn
from sklearn.datasets import make_regression
from sklearn.ensemble import HistGradientBoostingRegressor

x, y = make_regression(n_samples=200, n_features=4, random_state=0)
print(HistGradientBoostingRegressor(max_iter=5).fit(x, y).n_iter_)
