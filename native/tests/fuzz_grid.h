// The grid: lengths at which kernels change their path, or might forget a tail. Each pair of a K and an N is a cell,
// and so is each pair of one of these and a large M. M and the format of other cells run through all values for each K
// and for each N. The direction, the stack, strides, orders of memory, kinds of scales and blocks are random.

class Grid {
 public:
  Grid() {
    add(&k_, {{1, 200}, {255, 257}, {511, 513}, {1023, 1040}, {4095, 4097}});
    for (const int64_t k : {544, 576, 608, 672, 960, 1344, 2880})
      add(&k_, {{k, k}});  // segments of a half or a quarter
    add(&n_, {{1, 70}, {127, 130}});
    add(&m_, {{1, 17}, {31, 33}, {64, 64}, {127, 129}});
  }

  int64_t size() const { return pairs() + 3 * (count(k_) + count(n_)); }

  // All cells in some order, of which a sample takes the first.
  std::vector<int64_t> order(Random& random) const {
    std::vector<int64_t> all(size());
    for (int64_t i = 0; i < size(); ++i) all[i] = i;
    for (int64_t i = size() - 1; i > 0; --i) std::swap(all[i], all[below(random, i + 1)]);
    return all;
  }

  Cell cell(int64_t index) const {
    const int64_t i = index / count(n_), j = index % count(n_);
    Cell c = {};
    if (index < pairs()) {
      // Neither number of steps has a divisor with these numbers of values in common.
      c = {k_[i], n_[j], m_[(i + j) % count(m_)], 0, 0};
      set_format((i + 3 * j) % 11, &c);
      return c;
    }
    index -= pairs();
    c.m = std::vector<int64_t>{513, 2049, 32802}[index % 3];
    set_format(index % 11, &c);
    const int64_t at = index / 3, most = std::max<int64_t>(50000000 / c.m, 1);  // of k n, so that none takes minutes
    c.k = at < count(k_) ? k_[at] : std::min(1 + at % 64, std::max<int64_t>(most / n_[at - count(k_)], 1));
    c.n = at < count(k_) ? std::min(1 + at % 16, std::max<int64_t>(most / c.k, 1)) : n_[at - count(k_)];
    return c;
  }

 private:
  std::vector<int64_t> k_, n_, m_;

  static int64_t count(const std::vector<int64_t>& all) { return static_cast<int64_t>(all.size()); }
  int64_t pairs() const { return count(k_) * count(n_); }

  static void add(std::vector<int64_t>* all, std::vector<std::pair<int64_t, int64_t>> ranges) {
    for (const auto& range : ranges)
      for (int64_t i = range.first; i <= range.second; ++i) all->push_back(i);
  }

  // Codes of one to eight bits; of eight also integers and the two kinds of floats.
  static void set_format(int64_t number, Cell* c) {
    c->bits = static_cast<int>(std::min<int64_t>(number + 1, 8));
    c->values =
        number < 7 ? (is_split(c->bits) ? static_cast<int>(c->n % 2) : kValueTable) : static_cast<int>(number - 7);
  }
};
