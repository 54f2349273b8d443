// Who owns which page of the state pool: reference counts and a prefix tree over full pages.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

// Page ids with reference counts; a page is free again when nobody holds it.
class PageAllocator {
 public:
  explicit PageAllocator(int num_pages) : refs_(num_pages, 0) {
    for (int page = num_pages - 1; page >= 0; --page) free_.push_back(page);
  }

  int num_free() const { return static_cast<int>(free_.size()); }
  int refs(int page) const { return refs_[page]; }

  int allocate() {
    const int page = free_.back();
    free_.pop_back();
    refs_[page] = 1;
    return page;
  }

  void retain(int page) { ++refs_[page]; }

  void release(int page) {
    if (--refs_[page] == 0) free_.push_back(page);
  }

 private:
  std::vector<int> free_;
  std::vector<int> refs_;
};

// Finds the cached pages of a prompt. A node is one full page, its edge the tokens on that page.
// The page holds the recurrent state after its last token, so a prompt that starts with the tokens
// on the path to a node continues from that node's page. The tree holds one reference to each of
// its pages and gives leaves back, the least recently used first, when pages run out.
class PrefixTree {
 public:
  PrefixTree(PageAllocator& allocator, int page_size)
      : allocator_(allocator), page_size_(page_size) {}

  // Pages of the longest cached prefix, each retained for the caller.
  std::vector<int> match(const std::string& tokens) {
    std::vector<int> pages;
    Node* node = &root_;
    ++clock_;
    for (size_t end = page_size_; end <= tokens.size(); end += page_size_) {
      const auto child = node->children.find(tokens.substr(end - page_size_, page_size_));
      if (child == node->children.end()) break;
      node = child->second.get();
      node->last_used = clock_;
      allocator_.retain(node->page);
      pages.push_back(node->page);
    }
    return pages;
  }

  // Adds the full pages of `tokens`; a prefix that is there already keeps its own pages.
  void insert(const std::string& tokens, const std::vector<int>& pages) {
    Node* node = &root_;
    ++clock_;
    for (size_t i = 0; (i + 1) * page_size_ <= tokens.size(); ++i) {
      auto& child = node->children[tokens.substr(i * page_size_, page_size_)];
      if (!child) {
        child = std::make_unique<Node>();
        child->page = pages[i];
        allocator_.retain(pages[i]);
      }
      node = child.get();
      node->last_used = clock_;
    }
  }

  // Drops unused leaves until `num_free` pages are free; false if that cannot be.
  bool evict(int num_free) {
    while (allocator_.num_free() < num_free) {
      Oldest oldest;
      find_oldest(&root_, &oldest);
      if (!oldest.parent) return false;
      const auto leaf = oldest.parent->children.find(oldest.tokens);
      allocator_.release(leaf->second->page);
      oldest.parent->children.erase(leaf);
    }
    return true;
  }

 private:
  struct Node {
    int page = -1;
    uint64_t last_used = 0;
    std::map<std::string, std::unique_ptr<Node>> children;
  };

  struct Oldest {
    Node* parent = nullptr;
    std::string tokens;
    uint64_t last_used = UINT64_MAX;
  };

  void find_oldest(Node* node, Oldest* oldest) {
    for (auto& [tokens, child] : node->children) {
      if (!child->children.empty()) {
        find_oldest(child.get(), oldest);
      } else if (allocator_.refs(child->page) == 1 && child->last_used < oldest->last_used) {
        *oldest = {node, tokens, child->last_used};
      }
    }
  }

  PageAllocator& allocator_;
  size_t page_size_;
  Node root_;
  uint64_t clock_ = 0;
};
