import unittest

from waypoint.printer import directions
from waypoint.roads import Map
from waypoint.route import NoRoute, shortest


def valley() -> Map:
    roads = Map()
    roads.add("alp", "ford", 10)
    roads.add("alp", "mill", 2)
    roads.add("mill", "ford", 3)
    roads.add("ford", "port", 4, toll=6)
    roads.add("mill", "pass", 5)
    roads.add("pass", "port", 9)
    roads.add("port", "isle", 1, one_way=True)
    return roads


class RouteTest(unittest.TestCase):
    def test_detour_is_shorter(self):
        route = shortest(valley(), "alp", "ford")
        self.assertEqual((route.places, route.weight), (["alp", "mill", "ford"], 5))

    def test_long_way(self):
        self.assertEqual(shortest(valley(), "alp", "isle").weight, 10)

    def test_avoids_tolls_by_cost(self):
        route = shortest(valley(), "mill", "port", weight=lambda road: road.cost(0.5))
        self.assertEqual(route.places, ["mill", "pass", "port"])

    def test_closed_and_one_way(self):
        roads = valley()
        roads.close("mill", "ford")
        self.assertEqual(shortest(roads, "alp", "ford").weight, 10)
        with self.assertRaises(NoRoute):
            shortest(roads, "isle", "alp")

    def test_unknown_place(self):
        with self.assertRaises(NoRoute):
            shortest(valley(), "alp", "moon")

    def test_directions(self):
        text = directions(shortest(valley(), "ford", "isle"))
        self.assertIn("Total 5 km, toll 6.00.", text)
        self.assertEqual(directions(shortest(valley(), "alp", "alp")), "You are there.")


if __name__ == "__main__":
    unittest.main()
