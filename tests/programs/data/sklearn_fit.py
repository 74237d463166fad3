# needs: sklearn
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split

x, y = make_classification(n_samples=200, random_state=0)
a, b, c, d = train_test_split(x, y, random_state=0)
print(RandomForestClassifier(n_estimators=20, random_state=0).fit(a, c).score(b, d))
