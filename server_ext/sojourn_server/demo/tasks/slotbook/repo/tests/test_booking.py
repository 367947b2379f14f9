import unittest

from slotbook.building import Building, NothingFree
from slotbook.room import Room, Taken
from slotbook.slot import Slot

S = Slot.parse


class SlotTest(unittest.TestCase):
    def test_parse_and_print(self):
        self.assertEqual(str(S("9-10:30")), "09:00-10:30")
        self.assertEqual(S("9-10:30").minutes, 90)

    def test_touching_slots_do_not_overlap(self):
        self.assertFalse(S("9-10").overlaps(S("10-11")))
        self.assertTrue(S("9-10").overlaps(S("9:59-11")))

    def test_backwards(self):
        with self.assertRaises(ValueError):
            S("10-9")


class RoomTest(unittest.TestCase):
    def test_back_to_back(self):
        room = Room("oak", 4)
        room.book(S("9-10"), "ana")
        room.book(S("10-11"), "bo")
        self.assertEqual([str(gap) for gap in room.free(60)], ["08:00-09:00", "11:00-18:00"])

    def test_taken_and_cancelled(self):
        room = Room("oak", 4)
        room.book(S("9-10"), "ana")
        with self.assertRaises(Taken):
            room.book(S("9:30-10:30"), "bo")
        room.cancel(S("9-10"))
        room.book(S("9:30-10:30"), "bo")


class BuildingTest(unittest.TestCase):
    def test_smallest_room_first(self):
        building = Building(Room("hall", 40), Room("oak", 4), Room("elm", 6))
        names = [building.book(3, S("9-10"), "ana")[0] for _ in range(3)]
        self.assertEqual(names, ["oak", "elm", "hall"])
        with self.assertRaises(NothingFree):
            building.book(3, S("9-10"), "ana")
        self.assertEqual(building.book(3, S("10-11"), "ana")[0], "oak")


if __name__ == "__main__":
    unittest.main()
